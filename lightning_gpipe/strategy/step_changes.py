"""Warns of changes by training_step that come once for each micro-batch, and not for the batch.

A counter counts micro-batches then, and an average of weights moves once for each. Some mean just
that, such as a sum over rows: so it is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator, MeanMetric
from torchmetrics.wrappers import Running

from lightning_gpipe.core.faithful import Changes, Write, patched
from lightning_gpipe.core.pipeline import Outcome
from lightning_gpipe.strategy.optimizer_options import changed_options, options_of

_NAMES = 8  # in a warning
_BATCHES = 2  # to look at: the first may fill caches
_LIGHTNING = frozenset({*vars(L.LightningModule()), "log"})


class StepChanges:
    """Notes what steps change around ``layers``, and warns of it."""

    def __init__(self, module: L.LightningModule, layers: Collection[nn.Module]) -> None:
        self._module = module
        self._layers = layers
        self._batches = _BATCHES
        self._latest = 0  # how many micro-batches there were
        self._found: set[str] = set()  # by the latest step
        self._told: set[str] = set()
        self._means: set[str] = set()  # the names of means that may be those of batches
        self._numbers: set[int] = set()  # of micro-batches

    @contextmanager
    def noted(self, batch: Any, pieces: Sequence[Any]) -> Iterator[None]:
        """Note what the steps in a ``with`` block change, which run for ``pieces`` of a batch."""
        self._found = set()
        if not self._batches or self._latest == 1:  # whose changes are those of the batch
            yield
            self._latest = len(pieces)
            return
        module, optimizers = self._module, self._module.trainer.optimizers
        options = options_of(optimizers)
        own = [x for x in module.modules() if not isinstance(x, Metric | MetricCollection)]
        around = [each for each in own if each not in self._layers]
        paths = {each: path for path, each in module.named_modules(prefix="self")}
        watched = Changes(around, buffers_of=around, parameters_of=own, compared=True)
        with patched(_noting_metrics(module, self._found, self._means)):
            yield
        slots = watched.slots
        if self._batches == _BATCHES:
            slots -= watched.made
        self._latest = len(pieces)
        self._batches -= self._latest > 1
        own_of_lightning = {(module, name) for name in _LIGHTNING}
        self._found |= {f"{paths[x]}.{name}" for x, name in slots - own_of_lightning}
        self._found |= {
            f"{name!r} of an optimizer"
            for _, _, name in changed_options(options, options_of(optimizers))
        }
        for piece in pieces:
            if isinstance(piece, dict):
                self._found |= {f"batch[{key!r}]" for key in piece.keys() ^ batch.keys()}

    def warn(self, m: int, outcome: Outcome) -> None:
        """Warn of changes that each of m steps makes, and one step makes once.

        A mean of all micro-batches is that of all batches as long as each counts as much.
        """
        self._numbers.add(m)
        equal = m < 2 or (
            outcome.rows is not None and len({*outcome.rows}) == len({*outcome.weights}) == 1
        )
        names = self._found if m > 1 else set()
        if not equal or len(self._numbers) > 1:
            names = names | self._means
            self._means.clear()
        names -= self._told
        self._told |= names
        if names:
            rank_zero_warn(
                "training_step must leave nothing on the module or in the batch when it runs for "
                f"each micro-batch: each has changed {_listed(sorted(names))}. Keep values of "
                "the batch in on_train_batch_end, log the loss itself in place of a metric of it, "
                "make layers with statistics, such as batch norms, part of the pipeline, or write "
                "schedule='fill_drain'."
            )


def _noting_metrics(module: nn.Module, changed: set[str], means: set[str]) -> Iterator[Write]:
    """Yield changes by which metrics add their names.

    Sums, means and extremes of single values do, which are those of micro-batches, those with a
    window of so many updates, and those whose value is computed in between.
    """
    within = {x.base_metric for x in module.modules() if isinstance(x, Running)}
    for path, each in module.named_modules(prefix="self"):
        if isinstance(each, Running):
            for name in ("update", "forward"):
                yield vars(each), name, _noting_call(getattr(each, name), path, changed)
        elif each in within:
            continue
        elif isinstance(each, BaseAggregator):
            names = means if type(each) is MeanMetric else changed
            yield vars(each), "update", _noting_single_values(each.update, path, names)
        elif isinstance(each, Metric):
            yield vars(each), "compute", _noting_value(each, path, changed)


def _noting_call(call: Callable[..., Any], name: str, names: set[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        names.add(name)
        return call(*args, **kwargs)

    return noted


def _noting_single_values(
    update: Callable[..., None], name: str, names: set[str]
) -> Callable[..., None]:
    def noted(value: Any, *weight: Any, **named: Any) -> None:
        if not (weight or named or (isinstance(value, Tensor) and value.dim())):
            names.add(name)
        update(value, *weight, **named)

    return noted


def _noting_value(metric: Metric, path: str, names: set[str]) -> Callable[[], Any]:
    compute: Callable[[], Any] = metric.compute

    def noted() -> Any:
        if metric._should_unsync:  # not by its forward, for the value of a micro-batch
            names.add(f"the value of {path}.compute()")
        return compute()

    return noted


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])

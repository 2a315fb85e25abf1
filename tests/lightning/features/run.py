"""A run of a Trainer with all that it shows, to compare a pipelined one with the plain one."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests.lightning.features import found
from tests.support.checkpoints import numbers, structure
from tests.support.lightning_modules import Classifier, Data, trainer, weights

OWN_ENTRY = "lightning_gpipe"


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Args:
        trainer: The Trainer.
        root: The folder that it wrote to.
        calls: The calls of all hooks of a callback, in order, with their arguments.
        metrics: The metrics at each end of a batch or an epoch.
        results: What each method of the Trainer returned.
        printed: What was printed.
        data: The data module.
        told: What the logger of :class:`Case` was told.
    """

    trainer: L.Trainer
    root: Path
    calls: list[Any]
    metrics: list[dict[str, Tensor]]
    results: list[Any]
    printed: str
    data: Any

    def count(self, hook: str) -> int:
        """How often a hook was called."""
        return sum(name == hook for name, *_ in self.calls)

    def callback(self, kind: type[Any]) -> Any:
        """The callback of this class."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]  # a connector's
        return next(each for each in callbacks if isinstance(each, kind))


class Case(NamedTuple):
    """A feature in use.

    Args:
        options: The arguments of the Trainer that use it, given the folder to write to.
        shows: What shows that it was used; it is the same in both runs, and not empty.
        methods: What to call of the Trainer.
        build: Makes the module.
        data: Makes the data module.
        warns: The warning of Lightning that it gives in both runs.
    """

    options: Callable[[Path], dict[str, Any]]
    shows: Callable[[Run], Any]
    methods: tuple[str, ...] = ("fit",)
    build: Callable[[], L.LightningModule] = Classifier
    data: Callable[[], L.LightningDataModule] = Data
    warns: str = ""


def run(case: Case, root: Path, *, piped: bool) -> Run:
    """Run a case, plain on one device or as a pipeline over two."""
    root.mkdir()
    options = case.options(root)
    calls: list[Any] = []
    metrics: list[dict[str, Tensor]] = []
    given = options.get("callbacks", [])
    defaults = {
        "max_epochs": 2,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in given),
        "enable_progress_bar": any(isinstance(each, ProgressBar) for each in given),
    }
    options = defaults | options
    options["callbacks"] = [*given, recording(Callback, calls)(), Ends(metrics)]
    if piped:
        options |= {"strategy": GPipeStrategy([2, 4], chunks=3), "devices": 2}
    torch.manual_seed(0)
    model, data = case.build(), case.data()
    made = trainer(root, **options)
    with redirect_stdout(io.StringIO()) as printed:
        results = [getattr(made, method)(model, datamodule=data) for method in case.methods]
    return Run(made, root, calls, metrics, results, printed.getvalue(), data)


def assert_same_run(one: Run, other: Run) -> None:
    """Hooks, metrics, results, weights and the checkpoint are the same."""
    assert one.calls == other.calls
    close(one.metrics, other.metrics)
    close(one.results, other.results)
    close(weights(one.trainer), weights(other.trainer))
    if one.trainer.optimizers:
        close(*(saved(each) for each in (one, other)))


def saved(run: Run) -> Any:
    """The structure and the numbers of the checkpoint of a Trainer."""
    # As save_checkpoint, which would start a profiler again that the fit has ended.
    checkpoint = run.trainer._checkpoint_connector.dump_checkpoint()
    kinds = [str(each).replace(str(run.root), "") for each in structure(checkpoint)]
    return kinds, numbers(checkpoint)


def close(one: Any, other: Any) -> None:
    """Numbers are equal up to the order of sums, all else is equal."""
    if isinstance(one, Tensor | float):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    elif isinstance(one, dict):
        assert [*one] == [*other]
        for key, value in one.items():
            close(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            close(first, second)
    else:
        assert one == other


class Ends(Callback):
    """Notes the metrics that callbacks see at each end."""

    def __init__(self, metrics: list[dict[str, Tensor]]) -> None:
        self._metrics = metrics

    def _note(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._metrics.append(dict(trainer.callback_metrics))

    on_train_batch_end = on_validation_end = _note
    on_train_epoch_end = on_test_end = _note


def recording(base: type[Any], calls: list[Any], *, but: frozenset[str] = frozenset()) -> Any:
    """A subclass that notes each call of a hook, in ``calls``, and is else like ``base``.

    Args:
        base: A class of callbacks, modules or data modules.
        calls: Gets a tuple for each call: the name and the arguments.
        but: Hooks that are left alone.
    """
    kinds = {
        Callback: found.CALLBACK,
        L.LightningDataModule: found.DATA,
        L.LightningModule: found.HOOKS,
    }
    kind = next(kind for parent, kind in kinds.items() if issubclass(base, parent))
    names = {
        name
        for name in found.features()[kind] - but
        if callable(getattr(base, name, None)) and not isinstance(vars(base).get(name), classmethod)
    }
    return type(base.__name__, (base,), {name: _noting(base, name, calls) for name in names})


def _noting(base: type[Any], name: str, calls: list[Any]) -> Any:
    original = getattr(base, name)

    def hook(self: Any, *args: Any, **options: Any) -> Any:
        calls.append((name, described(args), described(options)))
        return original(self, *args, **options)

    return hook


def described(value: Any) -> Any:
    """A value as what two runs have in common: types and shapes of tensors, names of classes.

    A checkpoint of a pipeline has an entry more, of which a plain Trainer takes no notice.
    """
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return [
            (described(key), described(item)) for key, item in value.items() if key != OWN_ENTRY
        ]
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, bool | int | str | None) and "/" not in str(value):
        return value
    return type(value).__name__

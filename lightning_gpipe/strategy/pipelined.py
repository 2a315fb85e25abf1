"""The pipelines in a LightningModule, from setup to teardown.

The modules are piped within the whole LightningModule, whose forward and steps call them as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_gpipe.checkpoints import MeasuredBalances
from lightning_gpipe.core.frontends import candidates, is_installed, locate, on_meta
from lightning_gpipe.core.layout import check_balance
from lightning_gpipe.core.pipeline import (
    Entry,
    GPipe,
    PipedModule,
    parameters_around,
    piped_module_at,
    resolve,
    take_all,
)
from lightning_gpipe.core.schedules import ScheduleName, check_even
from lightning_gpipe.core.verify import FirstBatchVerifier, Verdict
from lightning_gpipe.strategy.options import StrategyOptions
from lightning_gpipe.strategy.refusals import AUTO_DEVICES, metrics_on_meta, warn_of_one_device

_STARVED = (
    "By the schedule threads could take {:.1f} ms: where operators are small, they wait for one "
    "another under Python's lock. processes='per_stage' gives each device its own interpreter."
)
_CHUNKS_PER_STAGE = 4  # Huang et al., "GPipe" (2019), section 2.3: the bubble is negligible


def piped_modules_of(
    root: nn.Module, paths: str | list[str] | None, balances: Any
) -> list[PipedModule]:
    """Return the piped modules at one path, at several, or, for None, where a search finds one.

    Raises:
        TypeError, ValueError: If a module is missing, ambiguous, or cannot be cut.
    """
    listed = list(paths) if isinstance(paths, list | tuple) else [paths]
    return take_all(root, [piped_module_at(root, *locate(root, path)) for path in listed], balances)


class PipelinedModule:
    """The pipelines in a LightningModule.

    Args:
        root: The LightningModule.
        settings: The user's settings.
        devices: One per worker.
        schedule: The schedule that the LightningModule allows; ``"auto"`` plans it.
        kept: The balances that were measured before; gets the new ones.
        agree: Returns the first process's value in each process.
        measured: Whether to measure the layers even if no balance needs it.
        sample: Returns the inputs of each pipeline, if its balance is measured.
        optimizers: Returns the optimizers, if a balance goes by memory.
        options: Other arguments of :class:`~lightning_gpipe.GPipe`.

    Attributes:
        found: The piped modules.
        outside: The device of what is around the pipelines.
    """

    def __init__(
        self,
        root: nn.Module,
        settings: StrategyOptions,
        devices: Sequence[torch.device],
        *,
        schedule: ScheduleName | Literal["auto"],
        kept: MeasuredBalances,
        agree: Callable[[Any], Any],
        measured: bool,
        sample: Callable[[Sequence[PipedModule]], list[Entry]],
        optimizers: Callable[[], list[Optimizer]],
        **options: Any,
    ) -> None:
        balances, around = settings.balances, settings.around
        self.found = piped_modules_of(root, settings.module, balances)
        balances_known = [
            kept.balance_of(piped.path, piped.name, len(piped.units), balance, len(devices))
            for piped, balance in zip(self.found, balances, strict=True)
        ]
        stages = [len(each) for each in balances_known if not isinstance(each, str)]
        requested = settings.requested(_CHUNKS_PER_STAGE * max([len(devices), *stages]), schedule)
        by_memory = requested.planned or "memory" in map(str, balances)
        choice = resolve(
            self.found,
            balances_known,
            requested,
            partial(sample, self.found),
            devices,
            around=around,
            microbatching=settings.microbatching,
            optimizer=optimizers() if by_memory else None,
            agree=agree,
            measured=measured,
        )
        sizes = choice.balances
        for piped, size in zip(self.found, sizes, strict=True):
            check_balance(size, len(piped.units), piped.name)
            check_even(
                len(size), len(devices), f"Write Trainer(devices={len(size)}). {AUTO_DEVICES}"
            )
        warn_of_one_device(balances, sizes, len(devices))
        kept.keep([piped.path for piped in self.found], balances, sizes)
        self._root = root
        self._verified: FirstBatchVerifier | None = None
        self._reported: set[tuple[str, bool]] = set()  # the faster way of each module
        options |= {
            "devices": devices,
            "chunks": choice.chunks,
            "activation_checkpointing": choice.activation_checkpointing,
            "deferred_batch_norm": settings.deferred_batch_norm,
            "microbatching": settings.microbatching,
            "threads": settings.threads,
            "split_backward": choice.split_backward,
            "around": around,
            "folded": settings.folded,
        }
        if settings.chunks is None:
            options["chunks"] = _CHUNKS_PER_STAGE * max(map(len, sizes))
        several = len(self.found) > 1
        self.pipeline = GPipe(
            root,
            sizes if several else sizes[0],
            module=self.found if several else self.found[0],
            **options,
        )
        if settings.verify and not choice.order.by_micro_batch:  # else steps are verified
            self._verified = FirstBatchVerifier(self.found, report)
        self.pipeline.plan, self.pipeline.profiles = choice.plan, list(choice.profiles)
        self.outside = self.pipeline.layout.outside
        self.schedule = choice.order.schedule

    def rebalance(self, balance: Any) -> None:
        """Cut by another balance, see :meth:`~lightning_gpipe.GPipe.rebalance`."""
        self.pipeline.rebalance(balance)

    def runs_of(self, taken: PipedModule) -> int:
        """Return how often one of the pipelines ran."""
        return taken.runs

    def around(self) -> list[nn.Parameter]:
        """Return the parameters that are used around the stages: each process has them."""
        layouts = self.pipeline.layouts
        shared = {id(parameter) for layout in layouts for parameter in layout.everywhere}
        inside = {
            id(parameter)
            for layout in layouts
            for partition in layout.partitions
            for parameter in partition.parameters
        }
        return [p for p in self._root.parameters() if id(p) in shared or id(p) not in inside]

    def elsewhere(self) -> set[str]:
        """Return the paths of the modules in stages of other processes."""
        here: dict[bool, set[nn.Module]] = {True: set(), False: set()}
        for layout in self.pipeline.layouts:
            for j, partition in enumerate(layout.partitions):
                inside = (module for layer in partition.layers for module in layer.modules())
                here[layout.owner_of(j) == layout.rank].update(inside)
        foreign = here[False] - here[True]
        return {path for path, module in self._root.named_modules() if module in foreign}

    def say_ways(self) -> None:
        """Report once whether threads or one thread run a pipeline, when it is measured."""
        for piped, way in zip(self.found, self.pipeline.ways, strict=True):
            if way is not None and (piped.name, way.faster) not in self._reported:
                self._reported.add((piped.name, way.faster))
                rank_zero_info(f"GPipe runs {piped.name} on {way}.")
                if way.starved and way.allowed is not None:
                    rank_zero_info(_STARVED.format(1e3 * way.allowed))

    def remove(self) -> None:
        """Let the LightningModule run as without a pipeline, and end the worker threads."""
        if self._verified is not None:
            self._verified.remove()
        self.pipeline.release()
        self.pipeline.close()

    def __str__(self) -> str:
        """A line for each module with its cut, then what is around and what could be piped."""
        lines = []
        for piped, layout in zip(self.found, self.pipeline.layouts, strict=True):
            cut = ", ".join(f"{part} on {layout.where(part.index)}" for part in layout.partitions)
            kind = type(piped.module).__name__
            lines.append(f"GPipe runs {piped.name} ({kind}) as a pipeline: {cut}")
        beside = parameters_around(self.found)
        if beside:
            lines[-1] += f"; around, on {self.pipeline.layout.outside}: {beside:,} parameters"
        if plain := self._plain():
            lines[-1] += f"; not piped: {', '.join(map(repr, plain))}"
        return ".\n".join([*lines, ""]).rstrip("\n")

    def _plain(self) -> list[str]:
        """Return the paths of other modules that could be piped."""
        inside = {module for piped in self.found for module in piped.module.modules()}
        return [path for path, module in candidates(self._root).items() if module not in inside]


def must_stay(root: nn.Module) -> bool:
    """Return whether a LightningModule must not be moved, because its setup has failed.

    Tensors are on the meta device, or another Trainer's pipeline is in use.
    """
    pipelined = any(map(is_installed, root.modules()))
    return pipelined or on_meta(root) or bool(metrics_on_meta(root))


def report(verdict: Verdict) -> None:
    """Report the result of a verification to the user.

    Raises:
        RuntimeError: If there is a difference without a known reason.
    """
    verdict.check()
    (rank_zero_info if verdict.clean else rank_zero_warn)(str(verdict))

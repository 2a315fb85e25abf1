"""What of a LightningModule runs as a pipeline, from setup to teardown.

An nn.Sequential becomes a pipeline of its own that is installed in its place. Anything else, and
several modules, are piped within the whole LightningModule, whose forward and steps call them as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_gpipe.core.frontends import (
    Installed,
    candidates,
    check_awaited,
    check_free,
    install,
    is_installed,
    locate,
    on_meta,
    place_around,
)
from lightning_gpipe.core.pipeline import (
    Entry,
    GPipe,
    Layers,
    Measuring,
    Taken,
    balances_for,
    chosen,
    laid_out,
    parameters_around,
    take_all,
    taken_at,
)
from lightning_gpipe.core.plan import (
    Around,
    ScheduleName,
    check_balance,
    check_even,
    check_outside,
)
from lightning_gpipe.core.verify import EachVerifiedOnce, Verdict, VerifiedOnce
from lightning_gpipe.kept_balance import KeptBalance
from lightning_gpipe.refusals import AUTO_DEVICES, metrics_on_meta, warn_of_one_device
from lightning_gpipe.settings import Settings

_STARVED = (
    "By the schedule threads could take {:.1f} ms: where operators are small, they wait for one "
    "another under Python's lock. processes='per_stage' gives each device its own interpreter."
)
_CHUNKS_PER_STAGE = 4  # Huang et al., "GPipe" (2019), section 2.3: the bubble is negligible


def taken_of(root: nn.Module, paths: str | Sequence[str] | None, balances: Any) -> list[Taken]:
    """What runs as a pipeline of a LightningModule.

    Args:
        root: The LightningModule.
        paths: As the user gave them: one, several, or None to search.
        balances: The balance of each.

    Raises:
        TypeError, ValueError: If nothing is there, if there is a choice, or if it cannot be cut.
    """
    if isinstance(paths, list | tuple):
        return take_all(root, [taken_at(root, *locate(root, path)) for path in paths], balances)
    assert paths is None or isinstance(paths, str), "checked by the strategy"
    return [taken_at(root, *locate(root, paths))]


def cut_evenly(
    found: Sequence[Taken], balances: Sequence[Any], measuring: Measuring, around: Around
) -> list[Sequence[int]]:
    """The number of units in each stage, of each of what was taken, checked.

    Args:
        found: What is cut.
        balances: As the user gave them.
        measuring: Measures units, if a balance goes by that; knows the devices.
        around: Which stage what is around is with.

    Raises:
        TypeError, ValueError: If a balance does not fit the module or the number of devices.
    """
    devices = len(measuring.devices)
    sizes = balances_for(found, balances, measuring, around)
    for taken, balance in zip(found, sizes, strict=True):
        check_balance(balance, len(taken.units), taken.name)
        check_even(len(balance), devices, f"Write Trainer(devices={len(balance)}). {AUTO_DEVICES}")
    return sizes


class Piped:
    """The pipelines in a LightningModule.

    Args:
        root: The LightningModule.
        settings: What the user says of them.
        devices: One per worker.
        schedule: What runs when, of what is possible; ``"auto"`` what is planned.
        kept: Balances that were measured before; gets those of this one.
        agree: Gives each process the numbers that the first one has measured.
        measured: Whether to measure the layers whatever the balances go by.
        sample: Tells what enters each pipeline, if its balance is measured.
        optimizers: Tells the optimizers, if a balance goes by memory.
        options: Other arguments of :class:`~lightning_gpipe.GPipe`.

    Attributes:
        found: What runs as a pipeline.
        pipeline: The pipeline; of several modules, all of them.
        outside: The device of what is around the pipelines.
        schedule: What runs when.
    """

    def __init__(
        self,
        root: nn.Module,
        settings: Settings,
        devices: Sequence[torch.device],
        *,
        schedule: ScheduleName | Literal["auto"],
        kept: KeptBalance,
        agree: Callable[[Any], Any],
        measured: bool,
        sample: Callable[[Sequence[Taken]], list[Entry]],
        optimizers: Callable[[], list[Optimizer]],
        **options: Any,
    ) -> None:
        balances, around = settings.balances, settings.around
        self.found = taken_of(root, settings.module, balances)
        sizes_given = kept.given(self.found, balances, len(devices))
        lists = [len(each) for each in sizes_given if not isinstance(each, str)]
        given = settings.given(_CHUNKS_PER_STAGE * max([len(devices), *lists]), schedule)
        by_memory = given.planned or "memory" in map(str, balances)
        measuring = Measuring(
            self.found,
            partial(sample, self.found),
            devices,
            **given.measured_with(),
            microbatching=settings.microbatching,
            optimizer=optimizers() if by_memory else None,
        )
        choice = agree(chosen(self.found, sizes_given, measuring, given, around))
        sizes = agree(cut_evenly(self.found, choice.balances, measuring, around))
        warn_of_one_device(balances, sizes, len(devices))
        profiles = measuring.profiles if measured else measuring.done
        kept.keep(self.found, balances, sizes)
        self._root = root
        self._installed: Installed | None = None
        self._verified: EachVerifiedOnce | None = None
        self._said: set[tuple[str, bool]] = set()  # which way is the faster one, of each module
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
        whole = choice.order.schedule == "fill_drain"  # else steps are verified
        self._pipe(sizes, verify=settings.verify and whole, **options)
        self.pipeline.plan, self.pipeline.profiles = choice.plan, profiles
        self.outside = self.pipeline.layout.outside
        self.schedule = choice.order.schedule

    def _pipe(self, sizes: Sequence[Sequence[int]], *, verify: bool, **options: Any) -> None:
        """Make the pipelines."""
        root = self._root
        if len(self.found) == 1 and isinstance(self.found[0], Layers):
            self._replace(self.found[0], sizes[0], verify=verify, **options)
            return
        if len(self.found) == 1:
            self.pipeline = GPipe(root, sizes[0], module=self.found[0], **options)
        else:
            self.pipeline = GPipe(root, sizes, module=self.found, **options)
        if verify:
            self._verified = EachVerifiedOnce(self.found, report)

    def _replace(
        self, taken: Layers, balance: Sequence[int], *, verify: bool, **options: Any
    ) -> None:
        """Install a pipeline of an nn.Sequential in its place."""
        module = taken.module
        check_awaited(self._root)
        check_free(module, taken.name)
        self.pipeline = GPipe(module, balance, module=taken.by_itself(), **options)
        layout = self.pipeline.layout
        check_outside(self._root, module, layout, layout.outside)
        run: Callable[[Any], Any] = self.pipeline.forward
        if verify:
            run = VerifiedOnce(self.pipeline, module, on_result=report)
        self._installed = install(module, run, taken.name)

    def rebalance(self, balance: Any) -> None:
        """Cut by another balance, see :meth:`~lightning_gpipe.GPipe.rebalance`."""
        if self._installed is None:
            self.pipeline.rebalance(balance)
            return
        (taken,), layout = self.pipeline.taken, self.pipeline.layout
        with taken.plain():  # it is cut as one that does not run as a pipeline
            check_balance(balance, len(taken.units), self.found[0].name)
            moved = laid_out(
                taken,
                taken.partitions(balance),
                layout.devices,
                layout.around,
                place=layout.place,
            )
            check_outside(self._root, taken.module, moved, moved.outside)
            self.pipeline.rebalance(balance)

    def runs_of(self, taken: Taken) -> int:
        """How often one of the pipelines ran."""
        return taken.runs if self._installed is None else self._installed.runs

    def around(self) -> list[nn.Parameter]:
        """The parameters that are used around the stages: each process has them."""
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
        """The paths of the modules in stages of other processes."""
        here: dict[bool, set[nn.Module]] = {True: set(), False: set()}
        for layout in self.pipeline.layouts:
            for j, partition in enumerate(layout.partitions):
                inside = (module for layer in partition.layers for module in layer.modules())
                here[layout.owner_of(j) == layout.rank].update(inside)
        foreign = here[False] - here[True]
        return {path for path, each in self._root.named_modules() if each in foreign}

    def place_around(self) -> None:
        """Move what is around the pipelines to its device."""
        if self._installed is not None:  # in any other case GPipe has done so
            inner = {taken.module for taken in self.found}
            place_around(self._root, inner, self.pipeline.layout.outside)

    def say_ways(self) -> None:
        """Say whether threads or one thread run a pipeline, once it is found; each once."""
        for taken, way in zip(self.found, self.pipeline.ways, strict=True):
            if way is not None and (taken.name, way.faster) not in self._said:
                self._said.add((taken.name, way.faster))
                rank_zero_info(f"GPipe runs {taken.name} on {way}.")
                if way.starved and way.allowed is not None:
                    rank_zero_info(_STARVED.format(1e3 * way.allowed))

    def remove(self) -> None:
        """Let the LightningModule run as without a pipeline, and end the worker threads."""
        if self._verified is not None:
            self._verified.remove()
        if self._installed is None:
            self.pipeline.release()
        else:
            self._installed.remove()
        self.pipeline.close()

    def __str__(self) -> str:
        """A line for each module: how it was cut, over what; and what else could have been."""
        lines = []
        for taken, layout in zip(self.found, self.pipeline.layouts, strict=True):
            cut = ", ".join(f"{each} on {layout.where(each.index)}" for each in layout.partitions)
            kind = type(taken.module).__name__
            lines.append(f"GPipe runs {taken.name} ({kind}) as a pipeline: {cut}")
        beside = parameters_around(self.found)
        if beside:
            lines[-1] += f"; around, on {self.pipeline.layout.outside}: {beside:,} parameters"
        if plain := self._plain():
            lines[-1] += f"; not piped: {', '.join(map(repr, plain))}"
        return ".\n".join([*lines, ""]).rstrip("\n")

    def _plain(self) -> list[str]:
        """The paths of what else could be piped."""
        inside = {module for taken in self.found for module in taken.module.modules()}
        return [path for path, each in candidates(self._root).items() if each not in inside]


def must_stay(root: nn.Module) -> bool:
    """Whether a LightningModule cannot be moved, or must not be.

    Setup has failed: tensors are on the meta device, or another Trainer's pipeline is in use.
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

"""Options of optimizers, such as learning rates, and their state, which a step may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gpipe.core.data import equal
from lightning_gpipe.core.faithful import set_elements
from lightning_gpipe.core.layout import holders, within

_LARGE = 64  # elements of a container in which no optimizers are looked for
Options = dict[tuple[int, int, str], Any]  # by the numbers of optimizer and group, and the name


def options_of(optimizers: Iterable[Optimizer]) -> Options:
    """Return the numbers and names among the options of all groups, and copies of small tensors."""
    return {
        (k, number, name): value.clone() if isinstance(value, Tensor) else value
        for k, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if all(map(_is_option, value if type(value) is tuple else [value]))
    }


def changed_options(before: Options, now: Options) -> Options:
    """Return those of ``now`` that are others than before."""
    return {k: x for k, x in now.items() if k not in before or not _same(x, before[k])}


def set_options(optimizers: Iterable[Optimizer], options: Options) -> None:
    """Give all groups these options; others stay."""
    for k, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                new = options.get((k, number, name), value)
                if isinstance(value, Tensor) and isinstance(new, Tensor):
                    value.copy_(new)
                else:
                    group[name] = new


@contextmanager
def same_options(trainer: Trainer) -> Iterator[None]:
    """Restore the options, and the state of schedulers, at the end of a ``with`` block."""
    options = options_of(trainer.optimizers)
    with _same_schedules(config.scheduler for config in trainer.lr_scheduler_configs):
        try:
            yield
        finally:
            set_options(trainer.optimizers, options)


@contextmanager
def held_optimizers_preserved(module: nn.Module) -> Iterator[None]:
    """Restore optimizers and schedulers that modules hold in attributes after a ``with`` block."""
    values = (value for holder in holders(module.modules()) for value in holder.held.values())
    pieces = {id(x): x for value in values for x in within(value, largest=_LARGE)}.values()
    optimizers = [(x, _state_of(x)) for x in pieces if isinstance(x, Optimizer)]
    with _same_schedules(x for x in pieces if isinstance(x, LRScheduler)):
        try:
            yield
        finally:
            for optimizer, state in optimizers:
                _restore(optimizer, *state)


def _state_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return the attributes and the groups of an optimizer, and copies of state and options."""
    groups = list(optimizer.param_groups)
    parameters = {id(p): p for group in groups for p in group["params"]}  # are not copied
    return dict(vars(optimizer)), groups, *deepcopy((optimizer.state, groups), parameters)


def _restore(optimizer: Optimizer, own: Any, groups: Any, state: Any, options: Any) -> None:
    set_elements(vars(optimizer), own)
    set_elements(optimizer.state, state)
    set_elements(optimizer.param_groups, groups)
    for group, former in zip(groups, options, strict=True):
        set_elements(group, former)


@contextmanager
def _same_schedules(schedulers: Iterable[Any]) -> Iterator[None]:
    schedulers = list(schedulers)
    states = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        yield
    finally:
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _is_option(value: Any) -> bool:
    is_small = type(value) is Tensor and not value.is_meta and value.numel() == 1
    return value is None or is_small or type(value) in (bool, int, float, str)

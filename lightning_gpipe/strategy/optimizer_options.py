"""The options of optimizers, such as learning rates, which the code of a step may set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.core.data import equal

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
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    states = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        yield
    finally:
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        set_options(trainer.optimizers, options)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _is_option(value: Any) -> bool:
    is_small = type(value) is Tensor and not value.is_meta and value.numel() == 1
    return value is None or is_small or type(value) in (bool, int, float, str)

"""Captures the inputs of a LightningModule's pipelines, for a balance that is measured.

By Lightning's convention, ``example_input_array`` has the arguments of the module's forward.
Without it, ``training_step`` is called with the first batch, and ends when it reaches the layers.
With manual optimization it finds optimizers that do nothing, for there are no others yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_gpipe.checkpoints import generators_of
from lightning_gpipe.core.faithful import (
    NOTHING,
    Attributes,
    Manager,
    RandomState,
    add_note,
    patched,
    together,
)
from lightning_gpipe.core.pipeline import Entry, PipedModule, calling, entries_of, unchanged
from lightning_gpipe.strategy.optimizer_options import held_optimizers_preserved

# Methods that change gradients and what has one, for the optimizers.
_OF_OPTIMIZERS = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


def entries_in(
    module: LightningModule, trainer: Trainer, modules: Sequence[PipedModule]
) -> list[Entry]:
    """Return the input of each pipeline; raise ValueError if there is neither example nor batch."""
    precision = trainer.precision_plugin
    example = module.example_input_array
    if example is not None:
        noted = _noted(module, "example_input_array", "an input that its forward takes")
        with noted, precision.train_step_context():
            return entries_of(modules, calling(module, precision.convert_input(example)))
    if trainer.state.fn != TrainerFn.FITTING:
        raise ValueError(
            f"a balance by time or memory, or a plan, needs a batch: got none outside of a fit, "
            f"and {type(module).__name__}.example_input_array is None. Set that in its __init__, "
            "fit with this strategy before, resume from a checkpoint that has a balance, or write "
            "a balance as a list, and a value in place of 'auto'."
        )
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def arguments() -> tuple[Any, ...]:
        batch = precision.convert_input(_first_batch(module, trainer))
        return (batch, 0) if numbered else (batch,)

    def step(*args: Any) -> None:
        with precision.train_step_context(), _idle_optimizers(module):
            module.training_step(*args)

    noted = _noted(module, "the first batch", "self.example_input_array, which is used instead")
    with noted, _own_optimizers_unchanged(module):
        return entries_of(modules, step, arguments)


def optimizers_of(module: LightningModule, trainer: Trainer) -> list[Optimizer]:
    """Return the optimizers that the module configures, for their kinds; none outside a fit."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    with _own_optimizers_unchanged(module), unchanged(module):
        return _configured(module)


def _configured(module: LightningModule) -> list[Optimizer]:
    configured: Any = module.configure_optimizers()
    return [] if configured is None else list(_configure_optimizers(configured)[0])


def _own_optimizers_unchanged(module: LightningModule) -> Manager:
    """Restore what optimizers that the module has itself change, and the gradients that they use.

    There are none at the beginning of the block.
    """
    gradients = [(Attributes(parameter), "grad", None) for parameter in module.parameters()]
    return together([patched(gradients), held_optimizers_preserved(module)])


def _idle_optimizers(module: LightningModule) -> Manager:
    """Let a step that optimizes manually run up to its layers in a ``with`` block, to no effect."""
    if module.automatic_optimization:
        return NOTHING
    made = [
        LightningOptimizer._to_lightning_optimizer(each, module.trainer.strategy)
        for each in _configured(module)
    ]
    for optimizer in made:
        vars(optimizer).update(step=_call_closure, zero_grad=_do_nothing)
    optimizers = made[0] if len(made) == 1 else made
    idle = dict.fromkeys(_OF_OPTIMIZERS, _do_nothing)
    found = {"optimizers": lambda use_pl_optimizer=True: optimizers, **idle}
    return patched((vars(module), name, method) for name, method in found.items())


def _call_closure(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    return None if closure is None else closure()  # it may call the layers


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _first_batch(module: LightningModule, trainer: Trainer) -> Any:
    loaders: Any = trainer.fit_loop._data_source.dataloader()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        _check_begins_anew(loader)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    shuffling = RandomState.of([x for loader in combined.flattened for x in generators_of(loader)])
    try:
        batch, _, _ = next(iter(combined))
        combined.reset()
    finally:
        shuffling.restore()
    batch = module._on_before_batch_transfer(batch)
    return module._apply_batch_transfer_handler(batch, device=device)


def _check_begins_anew(loader: Any) -> None:
    """Refuse a loader from which the fit could not get its first batch again."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else loader
    if isinstance(dataset, Iterator):
        raise ValueError(
            "a balance by time or memory needs the first batch of a train dataloader that can "
            f"begin anew: got {type(dataset).__name__}, an iterator. Set example_input_array in "
            "the __init__ of the LightningModule."
        )


@contextmanager
def _noted(module: LightningModule, source: str, cure: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cure = f"Give the LightningModule {cure}."
        if any(parameter.is_meta for parameter in module.parameters()):
            cure = (
                "Its parameters are on meta, where no forward can read the values of a tensor: if "
                "this one does, build it on the CPU."
            )
        add_note(
            error,
            f"raised in a call with {source}, made to find out what enters the pipeline, whose "
            f"layers are to be measured. {cure} Nothing is measured if balance is a list, no "
            "setting is to be planned, and there is no Rebalance.",
        )
        raise

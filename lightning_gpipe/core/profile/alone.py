"""A layer that runs by itself, as the engine runs stages.

It runs on shadows of its parameters, so that no gradient and no hook on a parameter is touched, and
on copies of its buffers. The copies are on the device that is to be measured, those of one layer at
a time, so that the model may be larger than the device, and need not be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, requires_grad
from lightning_gpipe.core.faithful import Write, add_note
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.run import Stage, StagePass, pass_alone
from lightning_gpipe.core.skip import using_table


@contextmanager
def alone(
    stage: Stage, program: Program | None, recomputed: Collection[int] = (), *, split: bool = False
) -> Iterator[StagePass]:
    """A stage that runs by itself in a ``with`` block; who takes no gradients drops them."""
    found = pass_alone(stage, program, recomputed=recomputed, split=split)
    with found.shadows.swapped_in(stage.journal), using_table({}):
        yield found
    found.take_gradients()
    found.release()


@contextmanager
def on_its_device(stage: Stage) -> Iterator[None]:
    """Let a stage have copies of its buffers on its device in a ``with`` block."""
    copies: dict[Tensor, Tensor] = {}
    writes: list[Write] = []
    for module in stage.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in copies:
                    copies[buffer] = buffer.detach().to(stage.device, copy=True)
                writes.append((module._buffers, name, copies[buffer]))
    cuda = stage.device.type == "cuda"
    with stage.journal.changed(writes), torch.cuda.device(stage.device) if cuda else nullcontext():
        yield


@contextmanager
def noted(stage: Stage, rows: int) -> Iterator[None]:
    """Add a note to an error that a layer raises."""
    try:
        yield
    except Exception as error:
        names = ", ".join(title for _, title in stage.titled) or str(stage.partition)
        add_note(
            error,
            f"raised in {names}, which ran by itself on a micro-batch of {rows} rows, on "
            f"{stage.device}, to measure what it costs. Pass an input that the model takes, or "
            "choose a balance that needs no measurement: a list, or 'parameters'.",
        )
        raise


def gradients_for(outputs: FlatTree) -> FlatTree:
    """A gradient for each output that requires one."""
    needed = map(requires_grad, outputs.leaves)
    return FlatTree(
        [
            torch.ones_like(leaf) if needs else None
            for leaf, needs in zip(outputs.leaves, needed, strict=True)
        ],
        outputs.spec,
    )


def tensors_in(stage: Stage) -> Iterator[Tensor]:
    """The parameters and buffers that a stage has now."""
    for module in stage.modules:
        for slots in (module._parameters, module._buffers):
            yield from (each for each in slots.values() if each is not None)

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
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import Stage, StagePass, pass_alone
from lightning_gpipe.core.skip import using_table


@contextmanager
def alone(
    stage: Stage, program: Program, recomputed: Collection[int] = (), *, split: bool = False
) -> Iterator[StagePass]:
    """Run a stage by itself in a ``with`` block; gradients that are not taken are dropped."""
    single = pass_alone(stage, program, recomputed=recomputed, split=split)
    with single.shadows.swapped_in(stage.journal), using_table({}):
        yield single
    single.take_gradients()
    single.release()


@contextmanager
def on_its_device(stage: Stage) -> Iterator[None]:
    """Give a stage copies of its buffers on its device, in a ``with`` block."""
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
    """Add a note to an error of a layer."""
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
    """Return a gradient for each output that requires one."""
    gradients = [torch.ones_like(x) if requires_grad(x) else None for x in outputs.leaves]
    return FlatTree(gradients, outputs.spec)


def tensors_in(stage: Stage) -> Iterator[Tensor]:
    """Yield the parameters and buffers that a stage has now."""
    for module in stage.modules:
        for slots in (module._parameters, module._buffers):
            yield from (tensor for tensor in slots.values() if tensor is not None)

"""Hooks on one of several outputs, and edits of outputs that share memory, are warned of."""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe

pytestmark = pytest.mark.parametrize("chunks", [1, 3])

Outputs = tuple[Tensor, Tensor]


class HiddenAndLogits(nn.Linear):
    def forward(self, x: Tensor) -> Outputs:  # type: ignore[override]
        return x, super().forward(x)


class TensorAndView(nn.Module):
    def forward(self, x: Tensor) -> Outputs:
        doubled = 2 * x
        return doubled, doubled[:, :2]


def backward(
    last: nn.Module, chunks: int, use: Callable[[Tensor], object], *, both: bool = True
) -> list[str]:
    """Use the first of two outputs, run backward, and return what was warned of."""
    layers = nn.Sequential(nn.Linear(4, 4), last)
    with (
        closing(GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=chunks)) as model,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        first, second = model(torch.ones(6, 4))
        use(first)
        loss = second.sum() + (first.sum() if both else 0)
        del first, second  # as a training_step does, before the Trainer's backward
        loss.backward()
    return [str(each.message) for each in caught]


def nothing(_: Tensor) -> None: ...


@pytest.mark.parametrize("both", [True, False])
def test_hook_on_one_output(chunks: int, both: bool) -> None:
    def hooked(x: Tensor) -> None:
        x.register_hook(nothing)

    [warned] = backward(HiddenAndLogits(4, 3), chunks, hooked, both=both)

    assert "register the hook in the layer" in warned


def test_retained_gradient_of_one_output(chunks: int) -> None:
    kept = []

    def retained(x: Tensor) -> None:
        x.retain_grad()
        kept.append(x)

    [warned] = backward(HiddenAndLogits(4, 3), chunks, retained)

    assert "or its retain_grad" in warned


def test_edit_of_an_output_that_shares_memory(chunks: int) -> None:
    [warned] = backward(TensorAndView(), chunks, lambda x: x.mul_(2))

    assert "outputs of a pipeline that share memory" in warned


@pytest.mark.parametrize("last", [HiddenAndLogits(4, 3), TensorAndView()])
def test_outputs_without_hooks_and_edits(chunks: int, last: nn.Module) -> None:
    assert not backward(last, chunks, lambda x: x + 1)


def test_the_only_output_may_be_hooked_and_edited(chunks: int) -> None:
    with closing(
        GPipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cpu"], chunks=chunks)
    ) as model:
        output = model(torch.ones(6, 4))
        output.register_hook(nothing)
        output.mul_(2).sum().backward()


def test_outputs_are_not_kept_alive(chunks: int) -> None:
    with closing(
        GPipe(nn.Sequential(HiddenAndLogits(4, 3)), [1], devices=["cpu"], chunks=chunks)
    ) as model:
        gc.disable()
        try:
            first, second = model(torch.ones(6, 4, requires_grad=True))
            references = weakref.ref(first), weakref.ref(second)
            del first, second
            assert not any(reference() is not None for reference in references)
        finally:
            gc.enable()

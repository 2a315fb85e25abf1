"""Hooks on gradients that are removed for a step; others in ``test_parameters_in_steps.py``."""

import pytest
import torch
from torch import nn

from lightning_gpipe.core.faithful import Journal, has_hooks
from lightning_gpipe.core.run.micro_batch_losses.outside_gradients import OutsideGradients


@pytest.fixture
def hooked() -> nn.Linear:
    linear = nn.Linear(1, 1)
    linear.weight.register_hook(lambda gradient: 2 * gradient)
    return linear


def doubled(hooked: nn.Linear) -> bool:
    """Whether the hook is called, which doubles the gradient."""
    [gradient] = torch.autograd.grad(hooked(torch.ones(1)), hooked.weight)
    return bool(gradient == 2)


def interrupted(hooked: nn.Linear, journal: Journal) -> OutsideGradients:
    """A step that Ctrl-C has ended just before it left the ``with`` block."""
    outside = OutsideGradients([hooked], journal)
    assert doubled(hooked)
    outside.without_hooks().__enter__()
    assert not doubled(hooked)
    return outside


def test_undo_registers_hooks_again(hooked: nn.Linear) -> None:
    interrupted(hooked, Journal()).undo()

    assert doubled(hooked)


def test_next_step_registers_the_hooks_again_that_an_interrupt_has_left(hooked: nn.Linear) -> None:
    """As where a second Ctrl-C comes before the hooks of the interrupted step are back."""
    journal = Journal()
    interrupted(hooked, journal)

    OutsideGradients([hooked], journal)

    assert has_hooks(hooked.weight)
    assert doubled(hooked)

"""Transparency: parameters and large buffers that layers edit in forward.

Each micro-batch edits them once. So a pipeline is compared with the plain module that is run on one
micro-batch after another, as in ``test_state_of_layers``.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, a_loss, assert_same, gradients, perceptron, rows
from tests.support.pipes import M, Pipe, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]


def decay(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.5).add_(0.1)


def decay_list(p: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p], 0.5)
        torch._foreach_add_([p], 0.1)


def decay_data(p: Tensor) -> None:
    p.data.mul_(0.5).add_(0.1)


def replace_data(p: Tensor) -> None:
    p.data = p.data * 0.5 + 0.1


def turn_data(p: Tensor) -> None:
    """Exchange the elements, whose sum and norm stay the same."""
    p.data.copy_(p.data.roll(1))


def clamp(p: Tensor) -> None:
    p.data.clamp_(-0.2, 0.2)


Edit = Callable[[Tensor], None]
EDITS: list[Edit] = [decay, decay_list, decay_data, replace_data]
every_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)


class Momentum(nn.Module):
    """Adds what an encoder gives whose parameters are not trained but edited by forward."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.query = nn.Linear(3, 3)
        self.key = nn.Linear(3, 3).requires_grad_(False)
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.key.parameters():
            self.edit(parameter)
        return self.query(x) + x * self.key(x.detach()).detach()


class PassedOn(Momentum):
    """Also passes gradients on through it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.key(x).tanh()


class Codebook(nn.Module):
    """Has a large buffer that forward edits."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.codes = nn.Buffer(torch.ones(2**17, 3))
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.codes[:1].clone()
        self.edit(self.codes)
        return y


class Edited(nn.Module):
    """Has a weight that is trained, and edited by forward."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9).view(3, 3))
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self.weight)
        return nn.functional.linear(x, self.weight)


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(perceptron(2), layer, *perceptron(2)).double()


def assert_same_in_micro_batches(pipe: Pipe, plain: nn.Sequential, steps: int = 3) -> None:
    pipeline = pipe(plain, [2, len(plain) - 2])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (plain, pipeline)]
    for seed in range(steps):
        x = rows(7, seed=seed).detach()
        a_loss(torch.cat([plain(each) for each in x.tensor_split(M)])).backward()
        a_loss(pipeline(x)).backward()
        assert_same(gradients(pipeline), gradients(plain))
        assert_same(pipeline.state_dict(), plain.state_dict())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@every_edit
def test_frozen_parameters(pipe: Pipe, edit: Edit) -> None:
    """Once a recomputation used those of the last micro-batch, and edited them again."""
    assert_same_in_micro_batches(pipe, around(Momentum(edit)))


@pytest.mark.parametrize("edit", [decay, decay_list], ids=lambda edit: edit.__name__)
def test_frozen_parameters_that_pass_gradients_on(
    pipe: Pipe, edit: Edit, mode: ActivationCheckpointing
) -> None:
    """Once this ended with autograd's error about versions, in the modes that keep activations.

    And an edit of a list of tensors was not noticed: under a dispatch mode, as in the first
    mini-batch and where layers draw, PyTorch does not count it.
    """
    plain, x = around(PassedOn(edit)), rows(7)
    pipeline = pipe(plain, [2, len(plain) - 2])
    if mode not in ("always", "except_last"):
        with pytest.raises(RuntimeError, match=r"a backward needs must not be edited .*'always'"):
            pipeline(x).square().sum().backward()
        return
    pipeline(x).square().sum().backward()
    for each in x.detach().tensor_split(M):
        plain(each).square().sum().backward()
    assert_same(gradients(pipeline), gradients(plain))


def test_layer_that_edits_what_its_own_backward_needs(pipe: Pipe) -> None:
    """The plain module fails, too, and PyTorch says by which operator."""
    plain = nn.Sequential(nn.Linear(3, 3), Call(lambda x: x.relu().add_(1)), nn.Linear(3, 3))
    pipeline = pipe(plain.double(), [2, 1])
    with pytest.raises(RuntimeError, match=r"compute a new tensor\. .*PyTorch says: one of"):
        pipeline(rows(7)).sum().backward()


@every_edit
def test_large_buffer(pipe: Pipe, edit: Edit) -> None:
    """Once an edit through .data of a buffer larger than 1 MiB was not noticed."""
    assert_same_in_micro_batches(pipe, around(Codebook(edit)), steps=2)


def test_trained_parameter_that_is_kept_in_bounds(pipe: Pipe) -> None:
    assert_same_in_micro_batches(pipe, around(Edited(clamp)))


def test_embedding_with_a_largest_norm(pipe: Pipe) -> None:
    plain = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Tanh(), *perceptron(2)).double()
    pipeline = pipe(plain)
    x = torch.tensor([[k % 5] for k in range(7)])

    for module in (plain, pipeline):
        a_loss(module(x)).backward()

    assert_same(gradients(pipeline), gradients(plain))
    assert_same(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("edit", [decay_data, turn_data])
def test_trained_parameter_that_every_forward_moves_on(
    pipe: Pipe, mode: ActivationCheckpointing, edit: Edit
) -> None:
    """Once one that exchanges the elements was not noticed."""
    if mode == "never":
        pytest.skip("nothing is run again")
    pipeline = pipe(around(Edited(edit)))

    with pytest.raises(RuntimeError, match="Edited must not edit its parameter 'weight'"):
        pipeline(rows(7)).sum().backward()


class Later(nn.Module):
    """Edits a frozen weight and a large buffer for inputs that are large."""

    def __init__(self, edited: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.codes = nn.Buffer(torch.ones(2**17, 3))
        self.edited = edited

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().max() > 2:
            decay(getattr(self, self.edited))
        return x * self.weight.clone() * self.codes[0].clone()


@pytest.mark.parametrize(
    "edited, message",
    [
        ("weight", r"edited layer 1\.weight for the first time"),
        ("codes", "Later must edit its buffer 'codes' in every forward or in none"),
    ],
)
def test_edit_for_the_first_time_in_a_later_step(
    pipe: Pipe, mode: ActivationCheckpointing, edited: str, message: str
) -> None:
    if mode == "never":
        pytest.skip("nothing is run again")
    pipeline = pipe(nn.Sequential(nn.Identity(), Later(edited), *perceptron(2)).double(), [2, 2])
    pipeline(torch.ones(7, 3).double()).sum().backward()

    with pytest.raises(RuntimeError, match=message):
        pipeline(3 * torch.ones(7, 3).double())


def test_trained_parameter_whose_data_is_replaced(pipe: Pipe) -> None:
    """The layer replaces the memory of a stand-in for the parameter: once the edit was lost."""
    pipeline = pipe(around(Edited(replace_data)))

    with pytest.raises(RuntimeError, match=r"other data of layer 1\.weight"):
        pipeline(rows(7))

"""Promise: a traced model in stages computes what the plain model does.

Here are also the tests of ``call_graph``, ``ownership`` and ``stage_modules``.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _python_dispatch

from lightning_gpipe.core.frontends.traced import TracedForward
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import assert_same, gradients
from tests.support.pipes import every_mode, with_and_without_threads
from tests.support.traced import Tracing, assert_same_run, images, in_microbatches
from tests.support.traced import tracing as tracing  # a fixture
from tests.support.traced_models import (
    Encoder,
    Inception,
    NumberedLayers,
    ResNet,
    UNet,
    VisionTransformer,
)

stages = pytest.mark.parametrize("n", [2, 4])
training = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def tokens() -> Tensor:
    return torch.randint(11, (7, 5), generator=torch.Generator().manual_seed(3))


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "unet": (UNet, images),
    "large": (NumberedLayers, lambda: images().mean((2, 3))),
    "transformer": (Encoder, tokens),
    "vision transformer": (VisionTransformer, images),
    "inception": (Inception, images),
}


@every_mode
@stages
@training
@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(tracing: Tracing, name: str, n: int, training: bool) -> None:
    torch.manual_seed(0)
    kind, inputs = MODELS[name]
    plain = kind().train(training)

    assert_same_run(tracing(plain, n), plain, inputs())


@every_mode
@stages
@with_and_without_threads
def test_residual_network_in_training(tracing: Tracing, n: int) -> None:
    """Batch norms normalise by micro-batch, and update their statistics once per mini-batch."""
    torch.manual_seed(0)
    plain = ResNet()
    piped = tracing(plain, n)
    whole = copy.deepcopy(plain)

    assert_same_run(piped, in_microbatches(plain), images(), of=plain, buffers=False)
    whole(images())
    assert_same(
        dict(piped.get_submodule("layer1.0.bn1").named_buffers()),
        dict(whole.get_submodule("layer1.0.bn1").named_buffers()),
    )


@every_mode
@stages
def test_residual_network_in_evaluation(tracing: Tracing, n: int) -> None:
    torch.manual_seed(0)
    plain = ResNet().eval()

    assert_same_run(tracing(plain, n), plain, images())


def test_argument_that_was_not_given_at_first(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Encoder()
    piped = tracing(plain, 3)
    mask = torch.zeros(7, 5, dtype=torch.bool)
    mask[:, 4] = True

    assert_same_run(piped, plain, tokens(), mask)
    assert_same_run(piped, plain, tokens())


def test_training_mode_may_change_between_calls(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Inception()
    piped = tracing(plain, 2)

    assert piped(images())["aux"] is not None
    piped.eval()
    plain.eval()
    assert piped(images())["aux"] is None
    assert_same_run(piped, plain, images())


def test_module_stays_what_it_was(tracing: Tracing) -> None:
    plain = VisionTransformer()
    piped = tracing(plain, 3)
    piped(images())

    assert type(piped) is VisionTransformer
    assert list(piped.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in piped.named_modules()] == [n for n, _ in plain.named_modules()]
    assert vars(piped).keys() - {"forward"} == vars(plain).keys()


def test_removed_pipeline_leaves_the_plain_module() -> None:
    model = ResNet()
    traced = TracedForward(model, "")
    traced.partitions([len(traced.units)])
    traced.install(lambda *_, **__: [torch.zeros(2)])
    assert model(images()).shape == (2,)

    traced.remove()
    traced.remove()

    assert model(images()).shape == (7, 2)
    assert vars(model).keys() == vars(ResNet()).keys()


def test_copy_runs_as_the_plain_module(tracing: Tracing) -> None:
    plain = ResNet().eval()
    piped = tracing(plain, 2)

    twin = copy.deepcopy(piped)

    torch.testing.assert_close(twin(images()), plain(images()))


def test_plain_calls_within_a_block(tracing: Tracing) -> None:
    model = ResNet().eval()
    traced = TracedForward(model, "")
    traced.partitions([len(traced.units)])
    traced.install(lambda *_, **__: [torch.zeros(2)])

    with traced.plain():
        assert model(images()).shape == (7, 2)
    assert model(images()).shape == (2,)
    traced.remove()


class Dropping(nn.Module):
    """Draws random numbers by functions between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.dropout(self.first(x), 0.5) * 1.5, 0.3)
        return self.second(x + torch.rand_like(x[:, :1])) + F.alpha_dropout(x, 0.5)


@every_mode
@with_and_without_threads
@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("chunks", [1, 3])
def test_values_drawn_between_layers(
    mode: ActivationCheckpointing, threads: bool, chunks: int
) -> None:
    """They are the same in recomputation, also where a step is tried; nothing is said of them."""
    x = torch.linspace(-1, 1, 7 * 8, dtype=torch.float64).view(7, 8).sin()

    def steps(mode: ActivationCheckpointing) -> list[Any]:
        torch.manual_seed(0)
        model = GPipe(
            Dropping(),
            [1, 1],
            devices=["cpu"] * 2,
            chunks=chunks,
            activation_checkpointing=mode,
            threads=threads,
        )
        found = []
        for _ in range(2):
            model.zero_grad()
            output = model(x)
            output.square().sum().backward()
            found += [output.detach(), gradients(model), torch.rand(2)]
        model.close()
        return found

    assert_same(steps(mode), steps("never"))


class Noting(torch.autograd.Function):
    """Notes whether torch.compile is told that it is within a mode: by a flag of the process."""

    flags: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Noting.flags.append(_python_dispatch.is_in_any_mode_without_ignore_compile_internals())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Noting.apply(self.first(x)))


@pytest.mark.skipif(
    not hasattr(_python_dispatch, "is_in_any_mode_without_ignore_compile_internals"),
    reason="torch.compile does not ask for that",
)
def test_trial_of_steps_does_not_touch_what_compilations_ask_for(tracing: Tracing) -> None:
    """Threads in a trial at once left it set now and then: all calls were compiled anew."""
    Noting.flags.clear()
    tracing(Doubling(), 2)(torch.rand(7, 8))

    assert len(Noting.flags) == 4  # of three micro-batches, and once in the trial
    assert not any(Noting.flags)

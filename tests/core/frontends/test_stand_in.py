"""What the user has put on the nn.Sequential itself counts when the GPipe is called."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe import GPipe
from lightning_gpipe.core.frontends.stand_in import StandIn
from tests.support.hooks import assert_same_twice, doubled
from tests.support.models import assert_same, assert_same_step, perceptron, rows, step
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

OnModule = Callable[[nn.Module], Any]

HOOKS: dict[str, OnModule] = {
    "pre-hook": lambda layers: layers.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "hook": lambda layers: layers.register_forward_hook(lambda _, x, y: y * 2 + x[0]),
    "hook with keywords": lambda layers: layers.register_forward_hook(
        lambda _, x, keywords, y: y * 3, with_kwargs=True
    ),
    "backward pre-hook": lambda layers: layers.register_full_backward_pre_hook(
        lambda _, outer: doubled(outer)
    ),
    "backward hook": lambda layers: layers.register_full_backward_hook(
        lambda _, inner, outer: doubled(inner)
    ),
}
on_module = pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)


@every_mode
@on_module
def test_hook_that_the_module_has(pipe: Pipe, register: OnModule) -> None:
    """Once it was ignored."""
    plain = perceptron(4)
    register(plain)

    assert_same_twice(pipe(plain), plain)


@on_module
def test_hook_that_the_module_gets_later(pipe: Pipe, register: OnModule) -> None:
    plain, layers = perceptron(4), perceptron(4)
    layers.load_state_dict(plain.state_dict())
    pipeline = pipe(layers, copy=False)

    register(plain)
    register(layers)

    assert_same_twice(pipeline, plain)


def test_hook_runs_once_and_until_it_is_removed(pipe: Pipe) -> None:
    layers, seen = perceptron(4), []
    pipeline = pipe(layers, copy=False)
    handles = [
        each.register_forward_hook(lambda module, x, y: seen.append(len(y)))
        for each in (layers, pipeline)
    ]

    pipeline(rows(7))
    for handle in handles:
        handle.remove()
    pipeline(rows(7))

    assert seen == [7, 7]


class Scaled(nn.Sequential):
    """Has a parameter, a buffer and extra state, of which a hook uses the first two."""

    shift: Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(3.0))
        self.register_buffer("cache", torch.tensor(4.0), persistent=False)
        self.extra = "nothing"
        self.register_forward_hook(scaled)

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def scaled(module: Any, x: Any, y: Tensor) -> Tensor:
    return y * module.scale + module.shift + module.cache


@pytest.fixture
def plain() -> Scaled:
    return Scaled(*perceptron(4)).double()


@every_mode
@with_and_without_threads
def test_parameters_and_buffers_of_the_module(pipe: Pipe, plain: Scaled) -> None:
    """Once they were missing in the pipeline's parameters, buffers and state dict."""
    pipeline = pipe(plain)

    assert_same_step(pipeline, plain, rows(7))
    assert "scale" in dict(pipeline.named_parameters())
    assert {"shift", "cache"} <= dict(pipeline.named_buffers()).keys()


def test_parameter_that_a_layer_shares(pipe: Pipe) -> None:
    def build() -> Scaled:
        torch.manual_seed(0)
        module = Scaled(*perceptron(4)).double()
        module.scale = module.get_parameter("0.bias")
        return module

    assert_same_step(pipe(build()), build(), rows(7))


def test_state_dict_loads_both_ways(pipe: Pipe, plain: Scaled) -> None:
    plain.extra = "something"
    pipeline = pipe(plain)
    other = Scaled(*perceptron(4)).double()
    again = pipe(Scaled(*perceptron(4)).double())

    other.load_state_dict(pipeline.state_dict())
    again.load_state_dict(plain.state_dict())

    assert list(pipeline.state_dict()) == list(plain.state_dict())
    assert other.extra == "something"
    assert_same(other.state_dict(), plain.state_dict())
    assert_same(again.state_dict(), plain.state_dict())


def test_hooks_of_the_state_dict(pipe: Pipe, plain: Scaled) -> None:
    seen: list[str] = []
    plain.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    plain.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    plain.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    pipeline = pipe(plain, copy=False)

    pipeline.load_state_dict(pipeline.state_dict())

    assert seen == ["saved", "loads", "loaded"]


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copy_has_its_own(pipe: Pipe, plain: Scaled, copied: Callable[[GPipe], GPipe]) -> None:
    plain.register_full_backward_hook(scaled_gradients)
    pipeline = pipe(plain)

    twin = copied(pipeline)

    assert_same_step(twin, plain, rows(7))
    assert twin.get_parameter("scale") is not pipeline.get_parameter("scale")
    assert pipeline.get_parameter("scale").grad is None
    twin.close()


def scaled_gradients(module: Any, inner: Any, outer: Any) -> Any:
    return doubled(inner)


def test_meta_tensors_of_the_module_itself(pipe: Pipe) -> None:
    class Own(Scaled):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.scale, 2)
            nn.init.constant_(self.shift, 3)
            nn.init.constant_(self.get_buffer("cache"), 4)

    with torch.device("meta"):
        module = Own(nn.Linear(3, 3), nn.Linear(3, 3))

    step(pipeline := pipe(module, copy=False), rows(7).float())

    assert pipeline.get_parameter("scale").grad is not None


def test_training_mode_is_the_modules(plain: Scaled) -> None:
    assert not StandIn(plain.eval()).training


def test_forward_of_the_object_itself_is_refused() -> None:
    """Once it was ignored."""
    module = perceptron(4)
    module.forward = lambda x: x  # type: ignore[method-assign]  # the fault under test

    with pytest.raises(
        TypeError, match=r"must have the forward of nn.Sequential.*assigned.*del mo"
    ):
        GPipe(module, [2, 2], devices=["cpu"] * 2)


class Drops(nn.Module):
    """Reads its own training flag, and keeps a part of it in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.frozen = nn.Dropout()

    def train(self, mode: bool = True) -> Drops:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.dropout(self.frozen(x), 0.5, self.training)


@pytest.mark.parametrize("balance", [[1, 1], [1, 2]], ids=["loop", "traced"])
def test_training_flag_is_that_of_the_model(balance: list[int]) -> None:
    """It was a copy: in evaluation the model went on to drop, and its train() was not called."""
    model, x = Drops(), torch.randn(4, 4)
    module = "blocks" if balance == [1, 1] else ""
    piped = GPipe(model, balance, devices=["cpu"] * 2, chunks=2, module=module)

    assert piped.train().training is model.training is True
    assert not model.frozen.training
    with torch.no_grad():
        assert not torch.equal(piped(x), model.eval()(x))
        model.train()
        piped.eval()
        assert piped.training is model.training is False
        torch.testing.assert_close(piped(x), copy.deepcopy(model)(x))
    piped.close()

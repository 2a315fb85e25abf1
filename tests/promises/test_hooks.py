"""One autograd node: hooks see and change what they would on the plain module.

A hook on a layer acts on each micro-batch; those here are linear in the gradient, so the
micro-batches add up to the gradient of one mini-batch. A hook on a parameter, on the pipeline
itself or on a module around it acts once per backward.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules import module as every_module

from lightning_gpipe.core.frontends.install import install
from tests.support.hooks import (
    LAYERS,
    assert_same_twice,
    doubled,
    every_mode_and_one_without_threads,
    six_layers,
)
from tests.support.models import assert_same, gradients, rows, step
from tests.support.pipes import M, Pipe

pytestmark = every_mode_and_one_without_threads


@pytest.fixture
def plain() -> nn.Sequential:
    return six_layers()


# Hooks on layers.

OnModule = Callable[[nn.Module], Any]


def mixed(_: nn.Module, inner: Any, outer: Any) -> Any:
    return (inner[0] + outer[0],)


MODULE_HOOKS: dict[str, OnModule] = {
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "hook": lambda layer: layer.register_forward_hook(lambda _, x, y: y * 2 + x[0]),
    "backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(
        lambda _, outer: doubled(outer)
    ),
    "backward hook": lambda layer: layer.register_full_backward_hook(
        lambda _, inner, outer: doubled(inner)
    ),
    "backward hook that mixes": lambda layer: layer.register_full_backward_hook(mixed),
}
on_module = pytest.mark.parametrize("register", MODULE_HOOKS.values(), ids=MODULE_HOOKS)


@pytest.mark.parametrize("k", range(LAYERS))
@on_module
def test_hook_on_a_layer(plain: nn.Sequential, pipe: Pipe, register: OnModule, k: int) -> None:
    pipeline = pipe(plain)
    for module in (plain, pipeline):
        register(module[k])

    assert_same_twice(pipeline, plain)


@on_module
def test_hooks_on_every_layer(plain: nn.Sequential, pipe: Pipe, register: OnModule) -> None:
    for layer in plain:
        register(layer)

    assert_same_twice(pipe(plain), plain)


@on_module
def test_hook_on_the_pipelined_module(plain: nn.Sequential, pipe: Pipe, register: OnModule) -> None:
    pipeline = pipe(plain)
    for module in (plain, pipeline):
        register(module)

    assert_same_twice(pipeline, plain)


def test_hook_on_the_pipelined_module_runs_once(plain: nn.Sequential, pipe: Pipe) -> None:
    pipeline, seen = pipe(plain), []

    def after_forward(_: nn.Module, x: Any, y: Any) -> None:
        seen.append((x[0].shape, y.shape))

    def after_backward(_: nn.Module, inner: Any, outer: Any) -> None:
        seen.append((inner[0].shape, outer[0].shape))

    pipeline.register_forward_hook(after_forward)
    pipeline.register_full_backward_hook(after_backward)

    step(pipeline, rows(7))

    assert seen == [((7, 3), (7, 3))] * 2


def test_forward_hook_that_was_removed(plain: nn.Sequential, pipe: Pipe) -> None:
    pipeline = pipe(plain)
    handles = [
        module[3].register_forward_hook(lambda _, x, y: y * 2) for module in (plain, pipeline)
    ]
    assert_same_twice(pipeline, plain)

    for handle in handles:
        handle.remove()

    assert_same_twice(pipeline, plain)


def test_forward_hook_with_keywords(plain: nn.Sequential, pipe: Pipe) -> None:
    def hook(_: nn.Module, x: Any, keywords: dict[str, Any], y: Tensor) -> Tensor:
        assert keywords == {}
        return y + x[0]

    plain[3].register_forward_hook(hook, with_kwargs=True)

    assert_same_twice(pipe(plain), plain)


def double_input_of_linear(layer: nn.Module, x: Any) -> Any:
    return (x[0] * 2,) if isinstance(layer, nn.Linear) else None


GLOBAL_HOOKS: dict[str, Callable[[], Any]] = {
    "pre-hook": lambda: every_module.register_module_forward_pre_hook(double_input_of_linear),
    "hook": lambda: every_module.register_module_forward_hook(
        lambda layer, x, y: y * 2 if isinstance(layer, nn.Linear) else None
    ),
    "backward pre-hook": lambda: every_module.register_module_full_backward_pre_hook(
        lambda layer, outer: doubled(outer) if isinstance(layer, nn.Linear) else None
    ),
    "backward hook": lambda: every_module.register_module_full_backward_hook(
        lambda layer, inner, _: doubled(inner) if isinstance(layer, nn.Linear) else None
    ),
}


@pytest.mark.parametrize("register", GLOBAL_HOOKS.values(), ids=GLOBAL_HOOKS)
def test_hook_on_every_module_there_is(
    plain: nn.Sequential, pipe: Pipe, register: Callable[[], Any]
) -> None:
    pipeline, unhooked = pipe(plain), step(deepcopy(plain), rows(7))
    handle = register()
    try:
        actual, expected = step(pipeline, rows(7)), step(plain, rows(7))
    finally:
        handle.remove()

    assert_same(actual._asdict(), expected._asdict())
    assert not torch.equal(expected.input_gradients[0], unhooked.input_gradients[0])


def test_hook_on_every_module_sees_the_users_modules_only(plain: nn.Sequential, pipe: Pipe) -> None:
    """Once it also saw the pipeline that runs in place of the user's module: a call too many."""
    seen: list[str] = []
    pipeline = pipe(plain, copy=False)
    installed = install(plain, pipeline.forward)
    handle = every_module.register_module_forward_hook(
        lambda layer, x, y: seen.append(type(layer).__name__)
    )
    try:
        plain(rows(7))
    finally:
        handle.remove()
        installed.remove()

    assert Counter(seen) == {"Sequential": 1, "Linear": 3 * M, "Tanh": 3 * M}


# Hooks on parameters.


def node_of(parameter: Tensor) -> Any:
    """The AccumulateGrad node, as DistributedDataParallel finds it."""
    view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


OnParameter = Callable[[Tensor, list[Tensor]], Any]


def before_accumulation(parameter: Tensor, seen: list[Tensor]) -> Any:
    def hook(incoming: tuple[Tensor]) -> Any:
        seen.append(incoming[0].clone())
        return doubled(incoming)

    node = node_of(parameter)
    node.register_prehook(hook)
    return node


def at_accumulation(parameter: Tensor, seen: list[Tensor]) -> Any:
    node = node_of(parameter)
    node.register_hook(lambda *_: seen.append(parameter.grad.clone()))  # type: ignore[union-attr]
    return node


def after_accumulation(parameter: Tensor, seen: list[Tensor]) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(2)

    return parameter.register_post_accumulate_grad_hook(hook)


def on_the_gradient(parameter: Tensor, seen: list[Tensor]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    return parameter.register_hook(hook)


PARAMETER_HOOKS = [before_accumulation, at_accumulation, after_accumulation, on_the_gradient]


@pytest.mark.parametrize("register", PARAMETER_HOOKS, ids=lambda f: f.__name__)
def test_hook_on_a_parameter(plain: nn.Sequential, pipe: Pipe, register: OnParameter) -> None:
    pipeline, seen, held = pipe(plain), [], []
    for module in (plain, pipeline):
        saw: dict[str, list[Tensor]] = {}
        for name, parameter in module.named_parameters():
            held.append(register(parameter, saw.setdefault(name, [])))
        seen.append(saw)

    assert_same_twice(pipeline, plain)

    assert_same(seen[1], seen[0])
    assert {len(calls) for calls in seen[0].values()} == {2}


@pytest.mark.parametrize("when", ["all", "any"])
def test_hook_on_several_parameters(plain: nn.Sequential, pipe: Pipe, when: Any) -> None:
    seen: list[list[Any]] = []
    for module in (plain, pipe(plain)):
        saw: list[Any] = []
        register_multi_grad_hook(tuple(module.parameters()), saw.append, mode=when)
        step(module, rows(7))
        seen.append(saw)

    assert len(seen[1]) == len(seen[0]) == 1
    if when == "all":  # which one is the first of any is the engine's affair
        assert_same(seen[1], seen[0])


# Hooks around the pipeline.


def test_hook_on_the_input(plain: nn.Sequential, pipe: Pipe) -> None:
    ends = []
    for module in (plain, pipe(plain)):
        x = rows(7)
        x.register_hook(lambda gradient: gradient * 3)
        module(x).exp().sum().backward()
        ends.append((x.grad, gradients(module)))

    assert_same(ends[1], ends[0])


def test_hook_on_the_node_of_the_output(plain: nn.Sequential, pipe: Pipe) -> None:
    pipeline = pipe(plain)
    for module in (plain, pipeline):
        y = module(rows(7))
        y.grad_fn.register_prehook(doubled)
        y.exp().sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_hook_on_input_and_output_together(plain: nn.Sequential, pipe: Pipe) -> None:
    seen: list[Any] = []
    for module in (plain, pipe(plain)):
        x = rows(7)
        y = module(x)
        register_multi_grad_hook((x, y), lambda grads: seen.append(list(grads)))
        y.exp().sum().backward()

    assert len(seen) == 2
    assert_same(seen[1], seen[0])


class Lends(nn.Module):
    """Has a module that it does not use."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.lent = lent

    def forward(self, x: Tensor) -> Tensor:
        return x


class Borrows(nn.Module):
    """Uses a module that it does not show to nn.Module."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.borrowed = (lent,)

    def forward(self, x: Tensor) -> Tensor:
        return self.borrowed[0](x)


def test_hook_on_a_parameter_that_another_stage_uses(pipe: Pipe) -> None:
    """Once only the parameter's own stage was asked whether it took part: its gradient was lost."""
    lent = nn.Linear(3, 3).double()
    layers = [Lends(lent), *(nn.Linear(3, 3).double() for _ in range(4)), Borrows(lent)]
    module = nn.Sequential(*layers)
    module(rows(6, 3)).square().sum().backward()
    expected = lent.weight.grad
    lent.weight.grad = None
    lent.weight.register_hook(lambda gradient: None)

    pipe(module, copy=False)(rows(6, 3)).square().sum().backward()

    assert lent.weight.grad is not None
    torch.testing.assert_close(lent.weight.grad, expected)

"""The caller's state of the thread applies on other threads, and nothing of it stays there.

Here are also the tests of ``recomputing``.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_gpipe.core.data import PendingTensor
from lightning_gpipe.core.faithful.managers import NOTHING
from lightning_gpipe.core.faithful.thread.context import Autocast, Context

CPU = torch.device("cpu")
T = TypeVar("T")


def in_a_fresh_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def entered(context: Context, look: Callable[[], T]) -> T:
    """What ``look`` finds in a fresh thread that has entered ``context``."""

    def enter() -> T:
        with context.entered():
            return look()

    return in_a_fresh_thread(enter)


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        Autocast.of("cpu"),
        torch.empty(()).device,
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_follows(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        context = Context.capture([CPU])

    assert entered(context, torch.is_grad_enabled) is enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_inference_mode_follows(enabled: bool) -> None:
    with torch.inference_mode(enabled):
        context = Context.capture([CPU])

    assert entered(context, torch.is_inference_mode_enabled) is enabled
    assert entered(context, torch.is_grad_enabled) is not enabled


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_follows(enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    with torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache):
        context = Context.capture([CPU])

    def look() -> tuple[Autocast, torch.dtype]:
        return Autocast.of("cpu"), nn.Linear(2, 2)(torch.ones(1, 2)).dtype

    expected = Autocast("cpu", dtype, enabled, cache), dtype if enabled else torch.float32
    assert entered(context, look) == expected


def test_default_device_follows() -> None:
    with torch.device("meta"):
        context = Context.capture([CPU])

    assert entered(context, lambda: torch.zeros(1).device.type) == "meta"


def test_default_device_that_was_set_for_good_follows() -> None:
    torch.set_default_device("meta")
    try:
        context = Context.capture([CPU])
    finally:
        torch.set_default_device(None)

    assert entered(context, lambda: torch.zeros(1).device.type) == "meta"


def test_default_device_that_was_set_and_taken_back() -> None:
    """torch 2.8: get_default_device() then raises AttributeError, and so did every forward."""
    torch.set_default_device("meta")
    torch.set_default_device(None)

    assert Context.capture([CPU]).default_device == CPU


def test_context_variables_follow() -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    token = request.set("of the caller")
    context = Context.capture([CPU])
    request.reset(token)

    found = in_a_fresh_thread(lambda: context.variables.copy().run(request.get))

    assert found == "of the caller"
    assert request.get() == "none"


def test_containers_in_variables_are_others_when_a_forward_is_recomputed() -> None:
    found: ContextVar[Any] = ContextVar("found")
    key, waiting = object(), torch.ones(1).as_subclass(PendingTensor)
    circle: list[Any] = []
    circle.append(circle)
    value: dict[str, Any] = {"list": [key, waiting], "others": (deque([1]), {2}), "circle": circle}
    token = found.set(value)
    context = Context.capture([CPU]).for_backward(recomputes=True)
    found.reset(token)

    value["list"].clear()
    again = context.variables[found]

    assert again["list"] == [key, None]
    assert again["others"] == (deque([1]), {2})
    assert again["others"][0] is not value["others"][0]
    assert again["circle"][0] is again["circle"] is not circle


def test_variables_are_not_kept_where_nothing_is_recomputed() -> None:
    found: ContextVar[Any] = ContextVar("found")
    token = found.set(object())
    kept = Context.capture([CPU]).for_backward(recomputes=False)
    found.reset(token)

    assert found not in kept.variables


def test_saved_tensors_hooks_follow() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.tolist())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = Context.capture([CPU])

    def save() -> None:
        with context.saving():
            torch.tensor([3.0], requires_grad=True).exp()

    before = list(packed)
    entered(context, save)

    assert before == []
    assert packed == [pytest.approx([20.0855], abs=1e-3)]


def test_saved_tensors_hooks_are_not_applied_twice_on_the_callers_thread() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = Context.capture([CPU])
        with context.entered(), context.saving():
            torch.ones(1, requires_grad=True).exp()

    assert len(packed) == 1


def test_hooks_of_torch_checkpoint_do_not_follow() -> None:
    found: list[Context] = []

    def function(x: Tensor) -> Tensor:
        found.append(Context.capture([CPU]))
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)

    assert [context.saved_tensors_hooks for context in found] == [None] * len(found)
    assert found


def test_without_hooks_nothing_is_applied() -> None:
    context = Context.capture([CPU])

    with context.saving():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    assert hooks is None


def test_entering_leaves_the_thread_as_it_was() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        context = Context.capture([CPU])
        captured = state()

    before = state()
    with context.entered():
        inside = state()

    assert inside == captured != before
    assert state() == before


def test_nothing_is_entered_where_the_thread_is_in_the_state_already() -> None:
    with torch.no_grad():
        context = Context.capture([CPU])
        assert context.entered() is NOTHING

    assert context.entered() is not NOTHING


def test_entering_leaves_the_thread_as_it_was_after_an_error() -> None:
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        context = Context.capture([CPU])
    before = state()

    with pytest.raises(KeyError), context.entered():
        raise KeyError

    assert state() == before


def test_default_dtype_is_set_for_a_while() -> None:
    context = Context.capture([CPU])
    torch.set_default_dtype(torch.float64)
    try:
        with context.default_dtype_set():
            during = torch.get_default_dtype()
        after = torch.get_default_dtype()
    finally:
        torch.set_default_dtype(torch.float32)

    assert (during, after) == (torch.float32, torch.float64)

"""Transparency: skip connections compute the same as in a plain nn.Sequential.

For any balance, chunks, recomputation and devices; also if tensors are shared, edited or None, as
compared with the plain module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import whole
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.skip.declare import in_flight, with_skips
from lightning_gpipe.core.verify.verification import verify
from tests.support.models import Call, assert_same, assert_same_step, gradients, rows, step
from tests.support.pipes import MODES, Pipe, every_mode, with_and_without_threads
from tests.support.process import seeded
from tests.support.skip_layers import Join, Of, Pop, Stash, added, ignored, itself, pair

W = 3


def linear() -> nn.Module:
    return nn.Linear(W, W).double()


def around(*between: nn.Module, of: Of = itself, join: Join = added) -> nn.Sequential:
    """A layer that computes and stashes, others, and one that pops."""
    stash, pop = pair(of, join)
    return nn.Sequential(nn.Sequential(linear(), stash), *between, pop)


def crossing() -> nn.Sequential:
    """Skips over 1, 3 and 6 of the 10 layers: one in another, and one that crosses both."""
    (a, f), (b, d), (c, e) = pair(torch.tanh, torch.mul), pair(), pair(lambda x: x * 2)
    first = nn.Sequential(nn.Sequential(linear(), a))
    return nn.Sequential(first, linear(), b, nn.Tanh(), c, d, linear(), f, nn.Tanh(), e)


# Transparency.


@with_and_without_threads
@every_mode
@pytest.mark.parametrize(
    "balance, devices",
    [
        ([10], 1),
        ([1, 9], 2),
        ([5, 5], 1),
        ([2, 4, 4], 3),
        ([4, 1, 5], 1),
        ([1, 3, 2, 4], 4),
        ([3, 2, 2, 3], 2),
    ],
)
def test_crossing_and_nested_skips(balance: list[int], devices: int, pipe: Pipe) -> None:
    module = crossing()
    pipeline = pipe(module, balance, devices=devices)

    for count in (7, 2, 1):
        assert_same_step(pipeline, module, rows(count))


@every_mode
@pytest.mark.parametrize("over", [0, 1, 8])
def test_skip_over_so_many_stages(over: int, pipe: Pipe) -> None:
    module = around(*(nn.Tanh() for _ in range(over)), of=torch.sin, join=torch.mul)
    pipeline = pipe(module, [1] * (over + 2))

    for _ in range(2):
        assert_same_step(pipeline, module, rows(7))


@with_and_without_threads
@every_mode
def test_pipeline_under_a_skip_of_the_model_around_it(pipe: Pipe) -> None:
    """What is in flight where the pipeline is called is none of its stages' skip tensors."""
    (stash, pop), first, tanh = pair(), linear(), nn.Tanh()
    inner = nn.Sequential(linear(), nn.Tanh(), linear())
    plain = nn.Sequential(first, stash, inner, tanh, pop)
    pipelined = nn.Sequential(first, stash, pipe(inner), tanh, pop)

    found = step(pipelined, rows(7))
    plain.zero_grad()
    expected = step(plain, rows(7))
    assert_same(found.output, expected.output)
    assert_same(found.input_gradients, expected.input_gradients)


@every_mode
def test_skips_in_eval_mode_and_statistics_of_batch_norms(pipe: Pipe) -> None:
    stash, pop = pair()
    norm = nn.BatchNorm1d(W).double()  # the skip comes before it, so it sees what it sees plain
    module = nn.Sequential(linear(), stash, norm, nn.Tanh(), pop)
    pipeline = pipe(module, [1, 1, 2, 1])

    for seed in range(3):
        step(pipeline, rows(10, seed=seed))
        step(module, rows(10, seed=seed))
    assert_same(dict(pipeline.named_buffers()), dict(module.named_buffers()))

    for each in (pipeline.eval(), module.eval()):
        each.zero_grad()
    assert_same_step(pipeline, module, rows(7))


def doubled(x: Tensor) -> Tensor:
    return x * 2


def edited(x: Tensor, skip: Tensor) -> Tensor:
    return x + skip.add_(1).mul_(3)


KINDS: dict[str, tuple[Of, Join]] = {
    "residual": (itself, added),
    "gate": (torch.tanh, lambda x, skip: x * skip),
    "integers": (lambda x: x.argmax(1, keepdim=True), lambda x, skip: x * (skip + 1)),
    "none": (lambda x: None, added),
    "without a gradient": (torch.detach, added),
    "not used": (doubled, ignored),
    "used alone": (itself, lambda x, skip: skip.sin()),
    "edited in place": (doubled, edited),
    "a view": (lambda x: x[:, :1], added),
    "transposed": (lambda x: doubled(x).t(), lambda x, skip: x + skip.t()),
}


@every_mode
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]])
def test_kinds_of_skips(kind: str, balance: list[int], pipe: Pipe) -> None:
    of, join = KINDS[kind]
    module = around(linear(), nn.Tanh(), of=of, join=join)
    pipeline = pipe(module, balance)

    for _ in range(2):
        assert_same_step(pipeline, module, rows(7))


@st.composite
def models(draw: st.DrawFn) -> nn.Sequential:
    """Layers, some of which stop gradients, and skips of all kinds among them; some are nested."""
    makes = st.sampled_from([linear, linear, nn.Tanh, nn.Tanh, lambda: Call(torch.detach)])
    layers: list[nn.Module] = [make() for make in draw(st.lists(makes, min_size=3, max_size=6))]
    layers[0] = linear()  # something to learn
    for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4)):
        stash, pop = pair(*KINDS[kind])
        first = draw(st.integers(0, len(layers)))
        last = draw(st.integers(first, len(layers)))
        layers[last:last] = [pop]
        layers[first:first] = [stash]
    sizes = draw(st.lists(st.integers(1, 3), min_size=len(layers), max_size=len(layers)))
    grouped: list[nn.Module] = []
    while layers:
        size = sizes.pop()
        grouped.append(layers[0] if size == 1 else nn.Sequential(*layers[:size]))
        layers = layers[size:]
    return nn.Sequential(*grouped)


@st.composite
def arguments(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    n = draw(st.integers(1, min(4, layers)))
    ends = st.lists(st.integers(1, max(1, layers - 1)), min_size=n - 1, max_size=n - 1, unique=True)
    return {
        "balance": [end - first for first, end in pairwise([0, *sorted(draw(ends)), layers])],
        "devices": ["cpu"] * draw(st.sampled_from([d for d in (1, 2, 3, 4) if n % d == 0])),
        "chunks": draw(st.integers(1, 5)),
        "activation_checkpointing": draw(st.sampled_from(MODES)),
        "threads": draw(st.booleans()),
    }


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), batch_size=st.integers(1, 7), seed=st.integers(0, 99))
def test_drawn_models(data: st.DataObject, batch_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    module = data.draw(models())
    plain, batch = deepcopy(module), rows(batch_size).detach()
    batch.requires_grad_(data.draw(st.booleans()))
    assume(plain(batch).requires_grad)
    pipeline = GPipe(module, **data.draw(arguments(len(module))))

    try:
        for _ in range(2):
            assert_same_step(pipeline, plain, batch)
    finally:
        pipeline.close()


# Circumstances, the skip going over a stage.


@pytest.mark.parametrize("join", [added, lambda x, skip: x if skip is None else edited(x, skip)])
def test_skip_that_is_none_in_some_steps(join: Join, pipe: Pipe) -> None:
    """Once the first step decided: a skip that was None then was not copied when it was edited."""

    def of(x: Tensor) -> Tensor | None:
        return x * 2 if there else None

    module = around(nn.Tanh(), of=of, join=join)
    pipeline = pipe(module, [1, 1, 1])

    for there in (False, True, False, True):  # noqa: B007  # `of` sees it
        assert_same_step(pipeline, module, rows(7))


@every_mode
@pytest.mark.parametrize(
    "then", [torch.detach, lambda x: x.argmax(1, keepdim=True)], ids=["detached", "integers"]
)
def test_only_the_skip_needs_a_gradient(then: Callable[[Tensor], Tensor], pipe: Pipe) -> None:
    """Once the stage between sent no gradients at all, and backward failed on their number."""
    stash, pop = Stash(torch.tanh, then), Pop()
    module = nn.Sequential(linear(), stash, Call(lambda x: x + 1), pop)
    pipeline = pipe(module, [1, 1, 1, 1])

    assert_same_step(pipeline, module, rows(7))


@every_mode
def test_frozen_part(pipe: Pipe) -> None:
    module = around(linear(), linear(), of=torch.tanh)
    pipeline = pipe(module, [1, 1, 2])
    x = rows(7).detach()

    for frozen in ([0], [1], [2], [0, 1], [0, 1, 2]):
        for each in (module, pipeline):
            for k, layer in enumerate(each):
                layer.requires_grad_(k not in frozen)
            each.zero_grad()
        if len(frozen) == 3:
            assert_same(pipeline(x), module(x))
        else:
            assert_same_step(pipeline, module, x)


BALANCES = [[3], [2, 1], [1, 2], [1, 1, 1]]


@every_mode
@pytest.mark.parametrize("balance", BALANCES)
def test_output_that_is_stashed_and_edited_by_a_later_layer(balance: list[int], pipe: Pipe) -> None:
    module = around(nn.ReLU(inplace=True))
    pipeline = pipe(module, balance)
    if len(balance) == 3:  # the two names of the tensor are on two stages
        with pytest.raises(
            RuntimeError, match="must not edit a tensor that another stage gets too"
        ):
            pipeline(rows(7))
        return

    for _ in range(2):
        assert_same_step(pipeline, module, rows(7))


@pytest.mark.parametrize("balance", BALANCES)
def test_popped_tensor_that_is_edited_and_is_the_input_too(balance: list[int], pipe: Pipe) -> None:
    module = around(nn.Identity(), join=edited)
    pipeline = pipe(module, balance)
    if len(balance) == 3:
        with pytest.raises(
            RuntimeError, match="must not edit a tensor that another stage gets too"
        ):
            pipeline(rows(7))
        return

    for _ in range(2):
        assert_same_step(pipeline, module, rows(7))


@every_mode
def test_edit_of_a_popped_tensor_that_backward_needs(pipe: Pipe) -> None:
    """The plain module raises; here the tensor that is saved is another one."""
    module = around(nn.Tanh(), of=torch.tanh, join=edited)
    pipeline = pipe(module, [1, 1, 1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(module, rows(7))
    module.zero_grad()
    pop = module[-1]
    assert isinstance(pop, Pop)
    pop.join = lambda x, skip: edited(x, skip.clone())

    for _ in range(2):
        assert_same_step(pipeline, module, rows(7))


def test_stash_of_what_is_no_tensor(pipe: Pipe) -> None:
    """Once tensors in a tuple kept their graph, so backward ran from one stage into another."""
    of: Any = lambda x: (x, x)  # noqa: E731  # what a type checker would refuse
    pipeline = pipe(around(nn.Tanh(), of=of, join=ignored), [1, 1, 1])

    with pytest.raises(TypeError, match="skip"):
        pipeline(rows(7))


@with_skips(stash=["skip"])
class StashWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0, 3.0, 5.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"skip": self.weight}


@every_mode
def test_stashed_parameter(pipe: Pipe) -> None:
    module = nn.Sequential(StashWeight(), linear(), nn.Tanh(), Pop(torch.mul))
    pipeline = pipe(module, [1, 1, 2])

    assert_same_step(pipeline, module, rows(7))


@every_mode
def test_stashed_tensor_of_the_whole_batch(pipe: Pipe) -> None:
    stash = Stash(lambda inputs: inputs["table"], lambda inputs: inputs["x"])
    module = nn.Sequential(stash, linear(), Pop(lambda x, table: x @ table.t().sin() @ table))
    pipeline = pipe(module, [1, 1, 1])

    found = []
    for each in (module, pipeline):
        table = rows(5, seed=1)
        y = each({"x": rows(7), "table": whole(table)})
        y.square().sum().backward()
        found.append((y.detach(), table.grad, gradients(each)))

    assert_same(found[1], found[0])


@pytest.mark.parametrize("manager", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients(
    kind: str, manager: Callable[[], AbstractContextManager[Any]], pipe: Pipe
) -> None:
    of, join = KINDS[kind]
    module = around(nn.Tanh(), of=of, join=join)
    pipeline = pipe(module, [1, 1, 1])

    for _ in range(2):
        with manager():
            actual, expected = pipeline(rows(7)), module(rows(7))
        assert_same(actual, expected)
        assert actual.is_inference() == expected.is_inference()


@every_mode
def test_autocast(pipe: Pipe) -> None:
    types: list[torch.dtype] = []

    def join(x: Tensor, skip: Tensor) -> Tensor:
        types.append(skip.dtype)
        return x + skip

    module = around(linear(), linear(), join=join).float()
    pipeline = pipe(module, [1, 1, 1, 1])
    x = rows(6).detach().float()

    for each in (module, pipeline):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = each(x)
        y.float().square().sum().backward()

    assert set(types) == {torch.bfloat16}
    # Sums in bfloat16 are taken over micro-batches.
    torch.testing.assert_close(gradients(pipeline), gradients(module), rtol=2e-2, atol=2e-2)


@with_and_without_threads
def test_dropout_is_the_same_under_a_seed(pipe: Pipe) -> None:
    module = around(nn.Dropout(), linear(), of=nn.Dropout())
    steps = []

    for mode in MODES:
        with seeded():
            pipeline = pipe(module, [1, 1, 2], mode=mode)
            steps.append([step(pipeline, rows(8))._asdict() for _ in range(2)])

    for other in steps[1:]:
        assert_same(other, steps[0])
    assert not torch.equal(steps[0][0]["output"], steps[0][1]["output"])


@every_mode
def test_two_forwards_before_a_backward(pipe: Pipe) -> None:
    module = crossing()
    pipeline = pipe(module, [1, 4, 5])

    for each in (module, pipeline):
        one, other = each(rows(7)), each(rows(4, seed=1))
        (one.square().sum() + other.exp().sum()).backward()

    assert_same(gradients(pipeline), gradients(module))


def test_copied_pipeline(pipe: Pipe) -> None:
    module = crossing()
    copied = deepcopy(pipe(module, [1, 4, 5]))

    assert_same_step(copied, module, rows(7))
    copied.close()


def test_verify(pipe: Pipe) -> None:
    pipeline = pipe(crossing(), [1, 4, 5])

    verify(pipeline, rows(7)).check()
    assert not in_flight()

"""Transparency: a step that calls several modules of a chain gives what the plain module gives.

Each micro-batch has a loss of its own, and the user's code runs between two modules, too. The
reference is the plain module on the whole mini-batch.

Here are also the tests of chains in ``pipeline/build``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.chains import Chain, Model, chains
from tests.support.faults import OwnError
from tests.support.models import assert_same, gradients, rows
from tests.support.processes import Owners, assert_equal, processes
from tests.support.ranks import Pool
from tests.support.skip_layers import Pop, Stash

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

ROUNDING = 1e-12  # of the largest gradient, in double precision

TWO = Chain(("loop", "loop"), ((1, 2), (2, 2)), 2, "1f1b", chunks=4)
OWNERS: dict[int, list[Owners]] = {
    2: [(0, 1)],
    3: [(0, 1, 2), (0, 0, 1)],
    4: [(0, 1, 2, 3), (0, 0, 1, 1)],
}


def run(pipeline: GPipe, case: Chain, model: Model, x: Tensor) -> Any:
    outcome = pipeline.by_micro_batch(model.step, x, schedule=case.schedule, around=model)
    assert outcome.loss is not None
    outcome.loss.backward()
    return outcome


def check(case: Chain) -> None:
    """Compare two steps, and a call of the whole model, with those of the plain module."""
    model = case.build()
    plain = deepcopy(model)
    pipeline = case.pipe(model)
    try:
        for seed in range(2):  # gradients accumulate
            x = case.batch(seed)
            outcome, result = run(pipeline, case, model, x), plain.step(x)
            result["loss"].backward()
            outputs = torch.cat([each["output"] for each in outcome.results])
            found = [outcome.loss.detach(), outputs]
            assert_same(found, [result["loss"].detach(), result["output"].detach()])
            assert_same(gradients(model), gradients(plain), within=ROUNDING)
        x = case.batch()
        assert_same(pipeline(x), plain(x), within=ROUNDING)  # by fill-drain
    finally:
        pipeline.close()


@settings(max_examples=settings().max_examples // 3)
@given(case=chains())
def test_drawn_chains(case: Chain) -> None:
    check(case)


@pytest.mark.parametrize("threads", [False, True])
def test_fill_drain_trains_too(threads: bool) -> None:
    case = replace(TWO, threads=threads, memory=True)
    model = case.build()
    plain, x = deepcopy(model), case.batch()
    pipeline = case.pipe(model)

    pipeline(x).square().mean().backward()

    plain(x).square().mean().backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    pipeline.close()


def losses_and_gradients(case: Chain, owners: Owners | None = None) -> Any:
    with torch.random.fork_rng(devices=[]):
        model = case.build()
        pipeline = case.pipe(model, **processes(owners))
        losses = [run(pipeline, case, model, case.batch(seed)).loss.detach() for seed in range(2)]
        pipeline.close()
        here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
        found = {name: x for name, x in gradients(model).items() if name in here}
        return losses, found, torch.rand(())


@settings(max_examples=settings().max_examples // 8)
@given(case=chains(dropout=True))
def test_drawn_chains_that_draw(case: Chain) -> None:
    """The numbers are the same with threads, without, and on recomputation."""
    other = replace(case, threads=not case.threads, mode="never")

    assert_equal(losses_and_gradients(case), losses_and_gradients(other))


@settings(max_examples=settings().max_examples // 8)
@given(
    drawn=chains(dropout=True).flatmap(
        lambda case: st.tuples(st.just(case), st.sampled_from(OWNERS[case.devices]))
    )
)
def test_drawn_chains_over_processes(four_ranks: Pool, drawn: tuple[Chain, Owners]) -> None:
    """To the bit as in one process; a penalty would need the weights of all."""
    case, owners = replace(drawn[0], penalty=False), drawn[1]
    losses, expected, number = losses_and_gradients(case)

    for found in four_ranks.run(losses_and_gradients, case, owners, among=len(set(owners))):
        assert_equal((found[0], found[2]), (losses, number))
        assert_equal(found[1], {name: expected[name] for name in found[1]})


def test_rebalance_and_copies() -> None:
    model = TWO.build()
    plain, x = deepcopy(model), TWO.batch()
    pipeline = TWO.pipe(model)

    pipeline.rebalance([[2, 1], [1, 3]])
    run(pipeline, TWO, model, x)

    plain.step(x)["loss"].backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    copied = deepcopy(pipeline)
    assert copied.balance == [[2, 1], [1, 3]]
    assert_same(copied(x), plain(x), within=ROUNDING)
    pipeline.close()
    copied.close()


def test_table_of_the_code_between() -> None:
    model = TWO.build()
    pipeline = replace(TWO, balances=((3,), (4,)), chunks=3).pipe(model)

    run(pipeline, TWO, model, TWO.batch())

    assert pipeline.timeline is not None
    assert str(pipeline.timeline.schedule) == (
        "stage 0 | F0 F1 .  B0 F2 B1 .  B2\n"
        "stage 1 | .  F0 B0 F1 B1 F2 B2 .\n"
        "caller  | P0 P1 P0 L0 P1 C0 P2 L1 C1 P2 B0 L2 C2 B1 B2\n"
    )
    pipeline.close()


def test_layers_find_the_context_variables_of_their_own_call() -> None:
    """Set between two calls, it is that of the second module's layers, also in recomputation."""
    scale = ContextVar("scale", default=1.0)
    case = replace(TWO, kinds=("sequential", "sequential"), mode="always")
    model = case.build()

    def scaled(layer: Any, args: Any, output: Tensor) -> Tensor:
        return output * scale.get()

    model.encoder[0].register_forward_hook(scaled)
    model.decoder[0].register_forward_hook(scaled)
    plain, x = deepcopy(model), case.batch()

    def step(model: Model, x: Tensor) -> Tensor:
        scale.set(2.0)
        y = model.encoder(model.enter(x))
        scale.set(3.0)
        return model.decoder(y).square().mean()

    pipeline = case.pipe(model)
    loss = pipeline.by_micro_batch(lambda x: step(model, x), x, around=model).loss
    assert loss is not None
    loss.backward()

    step(plain, x).backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    pipeline.close()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    "where, message",
    [
        ("between", "raised in training_step between its calls of two modules, for micro-batch 2"),
        ("decoder", "raised in forward of micro-batch 2 of 4 on stage 2"),
    ],
)
def test_error_is_said_where_it_is_raised(where: str, message: str, threads: bool) -> None:
    case = replace(TWO, kinds=("sequential", "sequential"), threads=threads)
    model = case.build()
    plain = deepcopy(model)
    pipeline, fails = case.pipe(model), [2]
    code = model.between if where == "between" else model.decoder[0]

    def fail(*_: Any) -> None:
        if fails:
            fails[0] -= 1
            if fails[0] < 0:
                raise OwnError

    with code.register_forward_pre_hook(fail), pytest.raises(OwnError) as raised:
        run(pipeline, case, model, case.batch())
    assert any(note.startswith(message) for note in raised.value.__notes__)

    run(pipeline, case, model, case.batch())  # the next step works
    plain.step(case.batch())["loss"].backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    pipeline.close()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_step_that_skips_a_batch_after_its_calls(mode: Any) -> None:
    case = replace(TWO, mode=mode)
    model = case.build()
    pipeline = case.pipe(model)

    def step(x: Tensor) -> None:
        model(x)

    assert pipeline.by_micro_batch(step, case.batch(), around=model).loss is None
    assert not gradients(model)
    pipeline.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_running_statistics_are_those_of_two_pipelines(deferred: bool) -> None:
    """Each module normalises its own micro-batches, and passes those of the other by."""
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"one": normed(), "two": normed()}).double(), rows(8).detach()
    other = deepcopy(model)
    options: Any = {"module": ["one", "two"], "chunks": 2, "deferred_batch_norm": deferred}

    def output(model: nn.ModuleDict, x: Tensor) -> Tensor:
        y: Tensor = model["two"](model["one"](x) * 2)
        return y

    pipeline = GPipe(model, [[1, 2], [2, 1]], chained=True, **options)
    loss = pipeline.by_micro_batch(lambda x: output(model, x).mean(), x, around=model).loss
    assert loss is not None
    loss.backward()
    output(model, x)
    apart = GPipe(other, [[1, 2], [2, 1]], **options)
    output(other, x).mean().backward()
    output(other, x)

    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))
    assert_same(gradients(model), gradients(other), within=ROUNDING)
    pipeline.close()
    apart.close()


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


class Skipping(nn.Module):
    """Two Sequentials, each with a skip connection of the same name past a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(Stash(), nn.Linear(3, 3), Pop(), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(self.one(x) * 2)
        return output


def test_skip_connections_within_modules() -> None:
    torch.manual_seed(0)
    model, x = Skipping().double(), rows(6).detach()
    plain = deepcopy(model)
    pipeline = GPipe(
        model,
        [[1, 1, 2]] * 2,
        module=["one", "two"],
        devices=["cpu"] * 3,
        chunks=3,
        chained=True,
        activation_checkpointing="always",
    )

    loss = pipeline.by_micro_batch(lambda x: model(x).square().mean(), x, around=model).loss
    assert loss is not None
    loss.backward()

    plain(x).square().mean().backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    assert_same(pipeline(x), plain(x), within=ROUNDING)
    pipeline.close()


# What is refused.


def in_turns(model: Model, x: Tensor) -> Tensor:
    return model.decoder(model.encoder(x)).mean()


def hooked(model: Model, x: Tensor, *, output: bool) -> Tensor:
    """A hook on what the decoder and the loss get: it would see two parts of the gradient."""
    y = model.encoder(x)
    y = y if output else y * 2
    y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model.decoder(y).mean() + y.mean()


STEPS: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "another order": (
        lambda model, x: model.encoder(model.decoder(x)).mean(),
        r"got a call of module\[1\] where a call of module\[0\] is next",
    ),
    "one of two": (
        lambda model, x: model.encoder(x).mean(),
        r"got its end where a call of module\[1\] is next",
    ),
    "one twice": (
        lambda model, x: in_turns(model, model.encoder(x)),
        r"got a call of module\[0\] where a call of module\[1\] is next",
    ),
    "another round": (
        lambda model, x: in_turns(model, in_turns(model, x) + x),
        r"got a call of module\[0\] where its end is next",
    ),
    "hook on an output": (partial(hooked, output=True), "a hook on a gradient must see all of it"),
    "hook on an input": (partial(hooked, output=False), "a hook on a gradient must see all of it"),
}


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_a_chain_does_not_have(name: str, threads: bool) -> None:
    step, message = STEPS[name]
    case = replace(TWO, kinds=("sequential", "sequential"), threads=threads)
    model = case.build()
    plain = deepcopy(model)
    pipeline = case.pipe(model)

    with pytest.raises(RuntimeError, match=message):
        pipeline.by_micro_batch(lambda x: step(model, x), case.batch(), around=model)

    run(pipeline, case, model, case.batch())  # the next step works
    plain.step(case.batch())["loss"].backward()
    assert_same(gradients(model), gradients(plain), within=ROUNDING)
    pipeline.close()


def test_modules_that_are_no_chain() -> None:
    model = TWO.build()
    pipeline = GPipe(model, [[1, 2], [2, 2]], module=["encoder", "decoder"])
    with pytest.raises(ValueError, match=r"one pipeline to run: got 2, encoder, decoder.*chained"):
        pipeline.by_micro_batch(model.step, TWO.batch(), around=model)


def test_value_on_a_layer_that_depends_on_rows() -> None:
    model = TWO.build()

    pipeline = TWO.pipe(model)

    def keeping(x: Tensor) -> Any:
        memory = model.enter(x)
        for layer in model.encoder:
            memory = layer(memory)
        model.decoder[0].scale = float(memory.detach().sum())
        for layer in model.decoder:
            memory = layer(memory)
        return memory.mean()

    with pytest.raises(RuntimeError, match=r"must be the same.*got another decoder\.0\.scale"):
        pipeline.by_micro_batch(keeping, TWO.batch(), around=model)
    pipeline.close()


def test_gradient_through_a_module_of_the_chain() -> None:
    case = replace(TWO, kinds=("sequential", "sequential"))
    model = case.build()
    pipeline = case.pipe(model)

    def step(x: Tensor) -> Tensor:
        entered = model.enter(x)
        y = model.encoder(entered)
        torch.autograd.grad(y.sum(), entered)
        return model.decoder(y).mean()

    with pytest.raises(RuntimeError, match="must not go through the pipeline"):
        pipeline.by_micro_batch(step, case.batch(), around=model)
    pipeline.close()

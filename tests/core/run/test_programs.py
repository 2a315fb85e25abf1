"""Promise: a program in micro-batches over stages computes what its steps do one after another."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import loss_term, whole
from lightning_gpipe.core.programs import Program, Route, SkipName, Step
from tests.support.models import assert_same
from tests.support.pipes import MODES, every_mode, with_and_without_threads
from tests.support.programs import Made, Running, call, plainly
from tests.support.programs import running as running  # a fixture
from tests.support.skip_layers import Pop, Stash

ROWS, WIDTH = 7, 4


def rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def linears(n: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(n)]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """No mean of the losses of micro-batches, and another for each output."""
    return sum(
        ((k + 1) * (x.mean().exp() + (x**2).mean()) for k, x in enumerate(outputs)),
        start=torch.zeros((), dtype=torch.float64),
    )


def gradients_of(*of: Any) -> list[Tensor | None]:
    tensors = [
        each if isinstance(each, Tensor) else parameter
        for each in of
        for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])
    ]
    return [x.grad for x in tensors]


def check(
    running: Running,
    blocks: list[nn.Linear],
    make: Callable[[list[nn.Linear]], list[Step]],
    inputs: list[int],
    outputs: list[int],
    values: list[Tensor],
) -> None:
    """Compare two steps with the plain run of copies of the modules."""
    n = len(running.engine.stages)
    copies = deepcopy(blocks)
    for _ in range(2):  # the second knows what the layers edit
        given = [whole(x) if x.dim() < 2 else x for x in values]
        others = [x.detach().clone().requires_grad_(x.requires_grad) for x in values]
        for each in (*blocks, *values):
            each.zero_grad() if isinstance(each, nn.Module) else setattr(each, "grad", None)
        for each in copies:
            each.zero_grad()
        found = running(Program(make(blocks), inputs=inputs, outputs=outputs, n=n), given)
        wanted = plainly(make(copies), inputs, outputs, others)
        assert_same(found, wanted)
        if loss_of(wanted).requires_grad:
            loss_of(found).backward()
            loss_of(wanted).backward()
        assert_same(gradients_of(*blocks, *values), gradients_of(*copies, *others))


def both(test: Any) -> Any:
    return every_mode(with_and_without_threads(test))


@both
def test_blocks_that_all_get_the_same_mask(running: Made) -> None:
    a, b, c, d = blocks = linears(4)
    mask = rows(1)

    def make(blocks: list[nn.Linear]) -> list[Step]:
        def block(linear: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
            return linear(x).tanh() * mask

        return [
            call(
                lambda x, mask, k=k: block(blocks[k], x, mask),
                k + 2,
                k // 2,
                0 if k == 0 else k + 1,
                mask=1,
            )
            for k in range(4)
        ]

    check(running([a, b], [c, d]), blocks, make, [0, 1], [5], [rows(), mask])


@both
def test_value_that_later_stages_and_the_caller_need(running: Made) -> None:
    blocks = linears(4)

    def make(blocks: list[nn.Linear]) -> list[Step]:
        return [
            call(blocks[0], 1, 0, 0),
            call(blocks[1], 2, 1, 1),
            call(blocks[2], 3, 2, 2),
            call(operator.add, 4, 2, 3, 1),
            call(blocks[3], 5, 3, 4),
            call(operator.add, 6, 3, 5, 1),
        ]

    made = running(*([each] for each in blocks))
    check(made, blocks, make, [0], [6, 1, 3], [rows()])


@both
def test_input_that_no_other_than_the_last_stage_needs(running: Made) -> None:
    blocks = linears(3)

    def make(blocks: list[nn.Linear]) -> list[Step]:
        return [
            call(blocks[0], 2, 0, 0),
            call(blocks[1], 3, 1, 2),
            call(operator.add, 4, 2, 3, 1),
            call(blocks[2], 5, 2, 4),
        ]

    bias = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).requires_grad_()
    check(running(*([each] for each in blocks)), blocks, make, [0, 1], [5], [rows(), bias])


@both
def test_value_that_is_a_tree_travels_by_routes(running: Made) -> None:
    blocks = linears(3)

    def make(blocks: list[nn.Linear]) -> list[Step]:
        return [
            call(lambda x: {"x": blocks[0](x), "twice": (2 * x, 3)}, 1, 0, 0),
            call(lambda tree: blocks[1](tree["x"]), 2, 1, 1),
            call(lambda x, tree: blocks[2](x) + tree["twice"][0] * tree["twice"][1], 3, 2, 2, 1),
        ]

    check(running(*([each] for each in blocks)), blocks, make, [0], [3], [rows()])


@both
def test_one_forward_before_the_backward_of_another_with_another_program(running: Made) -> None:
    a, b = blocks = linears(2)
    c, d = copies = deepcopy(blocks)
    made = running([a], [b])

    def straight(a: nn.Module, b: nn.Module) -> list[Step]:
        return [call(a, 1, 0, 0), call(b, 2, 1, 1)]

    def skipping(a: nn.Module, b: nn.Module) -> list[Step]:
        return [
            call(a, 1, 0, 0),
            call(torch.tanh, 2, 0, 1),
            call(b, 3, 1, 2),
            call(operator.add, 4, 1, 3, 1),
        ]

    found = [
        *made(Program(straight(a, b), inputs=[0], outputs=[2], n=2), [rows()]),
        *made(Program(skipping(a, b), inputs=[0], outputs=[4, 1], n=2), [rows(1)]),
    ]
    wanted = [
        *plainly(straight(c, d), [0], [2], [rows()]),
        *plainly(skipping(c, d), [0], [4, 1], [rows(1)]),
    ]
    loss_of(found).backward()
    loss_of(wanted).backward()

    assert_same(found, wanted)
    assert_same(gradients_of(*blocks), gradients_of(*copies))


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, list[int]]], int, list[int]]:
    """Stages; for each step its kind, stage and arguments; inputs of rows; outputs."""
    n = draw(st.integers(2, 4))
    given = draw(st.integers(1, 3))  # and one more, a bias for all rows
    stages = sorted(draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=9)))
    steps, made = [], list(range(given))
    for stage in stages:
        kind = draw(st.sampled_from(["linear", "tanh", "add", "bias"]))
        args = [draw(st.sampled_from(made))]
        if kind == "add":
            args.append(draw(st.sampled_from(made)))
        steps.append((kind, stage, args))
        made.append(len(made) + 1)
    results = list(range(given + 1, given + 1 + len(steps)))
    outputs = draw(st.lists(st.sampled_from(results), min_size=1, max_size=3, unique=True))
    return n, steps, given, outputs


@pytest.mark.parametrize("threads", [True, False])
@settings(max_examples=20, deadline=None)
@given(drawn=programs(), mode=st.sampled_from(MODES), fixed=st.booleans())
def test_drawn_programs(drawn: Any, mode: Any, fixed: bool, threads: bool) -> None:
    n, steps, given_rows, outputs = drawn
    blocks = linears(len(steps))
    bias = given_rows  # the number of the last input

    def make(blocks: list[nn.Linear]) -> list[Step]:
        made = []
        for k, (kind, stage, args) in enumerate(steps):
            runs: dict[str, Any] = {"linear": blocks[k], "tanh": torch.tanh}
            run = runs.get(kind, operator.add)
            more = [bias] if kind == "bias" else []
            made.append(call(run, given_rows + 1 + k, stage, *args, *more))
        return made

    of_stage = [
        [b for b, (_, at, _) in zip(blocks, steps, strict=True) if at == j] for j in range(n)
    ]
    made = Running(of_stage, ["cpu"] * n, mode=mode, threads=threads)
    values = [rows(k) for k in range(given_rows)]
    values[0].requires_grad_(not fixed)
    values.append(torch.linspace(-1, 1, WIDTH, dtype=torch.float64).requires_grad_())
    try:
        check(made, blocks, make, list(range(given_rows + 1)), outputs, values)
    finally:
        made.close()


@both
def test_without_gradients(running: Made) -> None:
    a, b = blocks = linears(2)

    def make(blocks: list[nn.Linear]) -> list[Step]:
        return [call(a, 2, 0, 0), call(b, 3, 1, 2), call(operator.add, 4, 1, 3, 1)]

    with torch.no_grad():
        (found,) = running([a], [b])(
            Program(make(blocks), inputs=[0, 1], outputs=[4], n=2), [rows(), rows(1)]
        )

    assert_same(found, b(a(rows())).detach() + rows(1).detach())
    assert not found.requires_grad


@both
def test_output_of_an_early_stage_alone_has_a_loss(running: Made) -> None:
    """No gradients come from the last stage then, and none on other routes."""
    a, b, c = linears(3)
    steps = [
        call(a, 1, 0, 0),
        call(b, 2, 1, 1),
        call(c, 3, 2, 2),
        call(operator.add, 4, 2, 3, 1),
    ]
    found = running([a], [b], [c])(Program(steps, inputs=[0], outputs=[4, 2], n=3), [rows()])

    loss_of(found[1:]).backward()

    copy_a, copy_b, _ = linears(3)
    loss_of([copy_b(copy_a(rows()))]).backward()
    assert_same(gradients_of(a, b), gradients_of(copy_a, copy_b))
    assert not any(p.grad is not None and p.grad.any() for p in c.parameters())


@both
def test_step_that_edits_in_place_what_another_stage_needs(running: Made) -> None:
    a, b = linears(2)
    steps = [
        call(a, 1, 0, 0),
        call(Tensor.add_, 2, 1, 1, 1.0, name="residual.add_"),
        call(b, 3, 1, 2),
    ]
    made = running([a], [b])
    assert_same(made(Program(steps, inputs=[0], outputs=[3], n=2), [rows()])[0], b(a(rows()) + 1.0))
    with pytest.raises(RuntimeError, match=r"residual.add_ must not edit a tensor that another"):
        made(Program(steps, inputs=[0], outputs=[3, 1], n=2), [rows()])


@both
def test_input_that_is_edited_in_place_stays_as_it_was(running: Made) -> None:
    a, b = linears(2)
    steps = [call(a, 2, 0, 0), call(Tensor.add_, 3, 1, 1, 2), call(b, 4, 1, 3)]
    made, bias = running([a], [b]), rows(1).detach()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            made(Program(steps, inputs=[0, 1], outputs=[4], n=2), [rows(), bias])
        assert_same(bias, rows(1).detach())


@both
def test_error_names_the_step_and_the_line(running: Made) -> None:
    class Faulty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    steps = [
        call(torch.tanh, 1, 0, 0),
        call(Faulty(2, 2), 2, 1, 1, name="blocks.7", line="model.py:7"),
    ]
    with pytest.raises(KeyError, match="mine") as caught:
        running([], [])(Program(steps, inputs=[0], outputs=[2], n=2), [rows()])

    notes = "\n".join(caught.value.__notes__)
    assert "raised in blocks.7 (Faulty), called in model.py:7" in notes
    assert "of 3 on stage 1 (no modules, cpu)" in notes


@both
def test_loss_terms_of_a_program(running: Made) -> None:
    class Penalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            loss_term("size", (y**2).mean(), reduction="mean")
            return y

    torch.manual_seed(0)
    a, b = (Penalised(WIDTH, WIDTH).double() for _ in range(2))
    steps = [call(a, 1, 0, 0), call(b, 2, 1, 1)]
    made = running([a], [b])
    program = Program(steps, inputs=[0], outputs=[1, 2], n=2)

    hidden, output = made(program, [rows()], terms=True)
    sizes = [3 / 7, 2 / 7, 2 / 7]
    total = sum(
        size * term.value.sum()
        for size, terms in zip(sizes, made.terms, strict=True)
        for term in terms
    )
    (total + hidden.sum() + output.sum()).backward()
    found = gradients_of(a, b)
    a.zero_grad()
    b.zero_grad()
    first = nn.Linear.forward(a, rows())
    last = nn.Linear.forward(b, first)
    ((first**2).mean() + (last**2).mean() + first.sum() + last.sum()).backward()
    assert_same(found, gradients_of(a, b))


@both
def test_modules_that_draw_and_keep_statistics(running: Made) -> None:
    """A recomputation draws the same; batch norms update once for the mini-batch."""
    drop, norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH).double()
    steps = [
        call(drop, 1, 0, 0),
        call(norm, 2, 1, 1),
        call(operator.add, 3, 1, 2, 1),
    ]
    made, x = running([drop], [norm]), rows()
    _, dropped = made(Program(steps, inputs=[0], outputs=[3, 1], n=2), [x])
    dropped.sum().backward()

    assert x.grad is not None
    assert_same(x.grad, (dropped / x).detach())
    plain = nn.BatchNorm1d(WIDTH).double()
    plain(dropped)
    assert norm.num_batches_tracked == 1
    assert_same(norm.running_mean, plain.running_mean)


@both
def test_tensor_from_outside_that_a_step_uses(running: Made) -> None:
    a, b = linears(2)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    steps = [call(a, 1, 0, 0), call(lambda x: x * scale.exp(), 2, 1, 1), call(b, 3, 1, 2)]
    found = running([a], [b])(Program(steps, inputs=[0], outputs=[3], n=2), [rows()])
    loss_of(found).backward()

    other = scale.detach().clone().requires_grad_()
    loss_of([b(a(rows()) * other.exp())]).backward()
    assert_same(scale.grad, other.grad)


@both
def test_skip_connection_between_modules_of_a_program(running: Made) -> None:
    a, b = linears(2)
    layers = nn.Sequential(Stash(), Pop())
    steps = [call(layers[0], 1, 0, 0), call(a, 2, 0, 1), call(b, 3, 1, 2), call(layers[1], 4, 1, 3)]
    made = running([layers[0], a], [b, layers[1]], routes=[Route(SkipName(None, "skip"), 0, 1)])
    (found,) = made(Program(steps, inputs=[0], outputs=[4], n=2), [rows()])
    loss_of([found]).backward()
    gradients = gradients_of(a, b)
    a.zero_grad()
    b.zero_grad()
    wanted = layers[1](b(a(layers[0](rows()))))
    loss_of([wanted]).backward()

    assert_same(found, wanted)
    assert_same(gradients, gradients_of(a, b))

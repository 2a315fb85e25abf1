"""Transparency: a loss term of a layer has the plain module's value and gradient.

A divergence of weights, the balance of a router, a penalty on activations: beside the output, from
any layer, in any number.

Here are also the tests of ``terms``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, PaddedSequences, collect_loss_terms, loss_term
from lightning_gpipe.core.data.terms import Reduction
from tests.support.models import Call, a_loss, assert_same, gradients, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

Hand = Callable[[nn.Linear, Tensor], None]


class Penalized(nn.Module):
    """A linear layer that hands something out."""

    def __init__(self, *hands: Hand) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hands = hands

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for hand in self.hands:
            hand(self.linear, y)
        return y.tanh()


def divergence(linear: nn.Linear, y: Tensor) -> None:
    loss_term("divergence", linear.weight.square().sum().log(), reduction="mean")


def activity(linear: nn.Linear, y: Tensor) -> None:
    loss_term("activity", y.square().sum())


def mean_activity(linear: nn.Linear, y: Tensor) -> None:
    loss_term("mean activity", y.square().mean(), reduction="mean")


def mean_of_the_positive(linear: nn.Linear, y: Tensor) -> None:
    positive = y[y > 0]
    loss_term("positive", positive.mean(), reduction="mean", weight=len(positive))


def largest(linear: nn.Linear, y: Tensor) -> None:
    loss_term("count", torch.tensor(len(y)))


HANDS = [divergence, activity, mean_activity, mean_of_the_positive, largest]


def model(*hands: Hand) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 3), Penalized(*hands), nn.Tanh(), Penalized(*hands)).double()


def run(module: nn.Module, batches: int = 1) -> Any:
    """The output, the terms, and the gradients of the input and the parameters."""
    inputs = [rows(7, seed=k) for k in range(batches)]
    module.zero_grad()
    with collect_loss_terms() as terms:
        outputs = [module(x) for x in inputs]
    loss = sum((a_loss(y) for y in outputs), start=torch.zeros(())) + 3 * sum(terms.values())
    loss.backward()
    return outputs, dict(terms), [x.grad for x in inputs], gradients(module)


def detached(results: Any) -> Any:
    outputs, terms, *others = results
    return [y.detach() for y in outputs], {n: t.detach() for n, t in terms.items()}, *others


@with_and_without_threads
@every_mode
@pytest.mark.parametrize(
    "hands", [*([hand] for hand in HANDS), HANDS], ids=[*(h.__name__ for h in HANDS), "all"]
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_terms_and_their_gradients(pipe: Pipe, hands: list[Hand], chunks: int) -> None:
    plain = model(*hands)
    pipeline = pipe(plain, stages=4, chunks=chunks)

    for _ in range(2):
        assert_same(detached(run(pipeline)), detached(run(plain)))


def all_terms(terms: dict[str, Tensor]) -> Tensor:
    return sum(terms.values(), start=torch.zeros(()))


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("hands", [[divergence], [activity], [mean_activity], HANDS[:3]])
def test_terms_with_a_loss_for_each_micro_batch(pipe: Pipe, hands: list[Hand]) -> None:
    plain = model(*hands)
    pipeline = pipe(plain, stages=4, chunks=3)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        with collect_loss_terms() as terms:
            output = module(x)
        return output.square().mean() + 3 * all_terms(terms)

    for _ in range(2):
        outcome = pipeline.by_micro_batch(lambda x: step(pipeline, x), rows(7))
        loss = step(plain, rows(7))
        assert outcome.loss is not None
        for each in (outcome.loss, loss):
            each.backward()
        assert_same([outcome.loss.detach()], [loss.detach()])
        assert_same(gradients(pipeline), gradients(plain))


def sum_with_a_weight(pipeline: nn.Module, x: Tensor) -> dict[str, Any]:
    with collect_loss_terms() as terms:
        loss = pipeline(x).square().mean()
    return {"loss": loss + terms["activity"], "loss_weight": len(x)}


def test_sum_in_a_loss_with_a_weight_of_its_own(pipe: Pipe) -> None:
    pipeline = pipe(model(activity), stages=4, chunks=3)

    with pytest.raises(RuntimeError, match="must have no sums of layers: got the loss term 'act"):
        pipeline.by_micro_batch(lambda x: sum_with_a_weight(pipeline, x), rows(7))


def mean_of_the_marked(x: Tensor) -> Tensor:
    """Hands out the mean of the rows that begin with a positive number, and its number of rows."""
    marked = x[x[:, 0] > 0]
    loss_term("marked", marked.exp().mean(), reduction="mean", weight=len(marked))
    return x


def clamped_mean_of_the_marked(x: Tensor) -> Tensor:
    marked = x[x[:, 0] > 0]
    mean = marked.exp().sum() / max(1, marked.numel())
    loss_term("marked", mean, reduction="mean", weight=len(marked))
    return x


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("number", [0, 1, 5])
def test_micro_batches_without_weight(pipe: Pipe, number: int) -> None:
    """The mean of no elements is NaN, which nothing times zero makes zero."""
    marks = mean_of_the_marked if number else clamped_mean_of_the_marked
    first = nn.Linear(3, 3)
    with torch.no_grad():
        first.weight.copy_(torch.eye(3))
        first.bias.zero_()
    plain = nn.Sequential(first, nn.Tanh(), Call(marks), nn.Linear(3, 3)).double()
    x = rows(7).detach()
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(7) < number, 1, -1)
    pipeline = pipe(plain, [3, 1])

    results = []
    for module in (plain, pipeline):
        with collect_loss_terms() as terms:
            output = module(x)
        (a_loss(output) + terms["marked"]).backward()
        results.append((terms["marked"].detach(), gradients(module)))
    assert_same(*results)


@every_mode
def test_two_forwards_add_up(pipe: Pipe) -> None:
    plain = model(divergence, activity)

    assert_same(detached(run(pipe(plain), batches=2)), detached(run(plain, batches=2)))


@every_mode
def test_term_alone_is_the_loss(pipe: Pipe) -> None:
    plain = model(mean_activity)
    pipeline = pipe(plain)

    for module in (plain, pipeline):
        with collect_loss_terms() as terms:
            module(rows(7))
        terms["mean activity"].backward()
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_term_that_is_not_used(pipe: Pipe) -> None:
    plain = model(activity, mean_activity)
    pipeline = pipe(plain)

    for module in (plain, pipeline):
        with collect_loss_terms() as terms:
            y = module(rows(7))
        (a_loss(y) + terms["activity"]).backward()
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_gradients_that_are_returned(pipe: Pipe) -> None:
    plain = model(divergence)
    pipeline = pipe(plain)
    found = []

    for module in (plain, pipeline):
        with collect_loss_terms() as terms:
            y = module(rows(7))
        loss = a_loss(y) + terms["divergence"]
        found.append(torch.autograd.grad(loss, list(module.parameters())))
    assert_same(found[1], found[0])


@every_mode
def test_term_of_a_frozen_pipeline_that_requires_no_gradient(pipe: Pipe) -> None:
    plain = model(activity).requires_grad_(False)
    pipeline = pipe(plain)
    found = []

    for module in (plain, pipeline):
        with collect_loss_terms() as terms:
            y = module(rows(7).detach())
        assert not y.requires_grad
        assert not terms["activity"].requires_grad
        found.append(terms["activity"])
    assert_same(found[1], found[0])


def test_terms_without_gradients(pipe: Pipe) -> None:
    plain = model(*HANDS)
    pipeline = pipe(plain)

    with torch.no_grad():
        pipeline(rows(7))  # nobody collects
        with collect_loss_terms() as expected:
            plain(rows(7))
        with collect_loss_terms() as terms:
            pipeline(rows(7))
    assert_same(terms, expected)


def test_mean_counts_rows_that_are_reordered(pipe: Pipe) -> None:
    class Tokens(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = batch["x"].sum(1)
            loss_term("mean", x.mean(), reduction="mean")
            return x

    plain = nn.Sequential(Tokens(), nn.Linear(2, 2).double())
    x = torch.randn(7, 9, 2, dtype=torch.float64)
    lengths = torch.tensor([3, 9, 1, 5, 4, 2, 2])
    x *= (torch.arange(9) < lengths[:, None])[..., None]
    batch = {"x": x, "lengths": lengths}
    microbatching = PaddedSequences("lengths", trim=["x"], pad_outputs=False)

    with collect_loss_terms() as expected:
        plain(batch)
    with collect_loss_terms() as terms:
        pipe(plain, microbatching=microbatching)(batch)
    assert_same(terms, expected)


# What is refused.


def hands_out(value: Any, reduction: Any = "sum") -> nn.Sequential:
    return nn.Sequential(
        Penalized(lambda linear, y: loss_term("l", value(linear, y), reduction=reduction)),
        nn.Linear(3, 3),
    ).double()


@pytest.mark.parametrize("piped", [True, False])
def test_term_that_nobody_collects(pipe: Pipe, piped: bool) -> None:
    plain = model(divergence)

    with pytest.raises(RuntimeError, match="'divergence' must be collected.*collect_loss_terms"):
        (pipe(plain) if piped else plain)(rows(7))


@pytest.mark.parametrize("piped", [True, False])
@pytest.mark.parametrize(
    "value, reduction, message",
    [
        (lambda linear, y: y, "sum", r"'l' must be a 0-dim tensor: got shape \(\d, 3\)"),
        (lambda linear, y: 0.5, "sum", "'l' must be a 0-dim tensor: got 0.5"),
        (lambda linear, y: y.sum(), "max", "reduction must be 'sum' or 'mean': got 'max'"),
    ],
)
def test_term_that_is_none(
    pipe: Pipe, piped: bool, value: Any, reduction: str, message: str
) -> None:
    plain = hands_out(value, reduction)

    with pytest.raises((TypeError, ValueError), match=message), collect_loss_terms():
        (pipe(plain) if piped else plain)(rows(7))


def test_terms_that_differ_between_micro_batches(pipe: Pipe) -> None:
    def sometimes(linear: nn.Linear, y: Tensor) -> None:
        if len(y) == 3:
            activity(linear, y)

    pipeline = pipe(model(sometimes))
    with collect_loss_terms(), pytest.raises(ValueError, match="same loss terms for each micro"):
        pipeline(rows(7))


def test_terms_that_differ_when_recomputed(pipe: Pipe) -> None:
    calls: list[None] = []

    def at_first(linear: nn.Linear, y: Tensor) -> None:
        calls.append(None)
        if len(calls) <= 6:
            activity(linear, y)

    pipeline = pipe(model(at_first), mode="always", threads=False)
    with collect_loss_terms():
        y = pipeline(rows(7))
    with pytest.raises(RuntimeError, match="the same loss terms when its forward is recomputed"):
        a_loss(y).backward()


def test_collecting_ends_with_the_block() -> None:
    plain = model(activity)
    with collect_loss_terms() as outer:
        plain(rows(2))
        with collect_loss_terms() as inner:
            plain(rows(2))
        plain(rows(2))

    assert_same(outer["activity"], 2 * inner["activity"])
    with pytest.raises(RuntimeError, match="must be collected"):
        plain(rows(2))


def test_reductions_are_named() -> None:
    names: list[Reduction] = ["sum", "mean"]
    with collect_loss_terms() as terms:
        for name in names:
            loss_term(name, torch.ones(()), reduction=name)

    assert list(terms) == names


# Terms that are kept aside.


class Aside(nn.Linear):
    """Keeps something in an attribute that is not handed out."""

    kept: Tensor

    def __init__(self, term: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__(3, 3)
        self.term = term

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.term(self, x)
        return super().forward(x)


def kept_by(pipeline: GPipe, k: int) -> Tensor:
    layer = pipeline[k]
    assert isinstance(layer, Aside)
    return layer.kept


TERMS: list[tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = [
    (lambda linear, x: linear.weight.square().sum(), r"layer 2.weight in stage 1 \(layers 2..3"),
    (lambda linear, x: x.square().mean(), r"the input of stage 1 \(layers 2..3"),
]


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("term, where", TERMS, ids=["parameter", "input"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_term_in_an_attribute(
    pipe: Pipe,
    term: Callable[[nn.Linear, Tensor], Tensor],
    where: str,
    chunks: int,
) -> None:
    layers = [nn.Linear(3, 3), nn.Tanh(), Aside(term), nn.Tanh()]
    pipeline = pipe(nn.Sequential(*layers).double(), chunks=chunks)
    y = pipeline(rows(7))
    loss = a_loss(y) + kept_by(pipeline, 2)

    with pytest.raises(RuntimeError, match=f"must be handed out of its layer: .* for {where}"):
        loss.backward()

    pipeline.zero_grad()
    a_loss(pipeline(rows(7))).backward()  # without it all is well
    plain = nn.Sequential(*layers).double()
    plain.load_state_dict(pipeline.state_dict())
    plain.zero_grad()
    a_loss(plain(rows(7))).backward()
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
@pytest.mark.parametrize("then", ["the backward of the output", "another forward"])
@pytest.mark.parametrize("term, where", TERMS, ids=["parameter", "input"])
def test_term_in_an_attribute_that_is_the_only_loss(
    pipe: Pipe, term: Callable[[nn.Linear, Tensor], Tensor], where: str, then: str
) -> None:
    layers = [nn.Linear(3, 3), nn.Tanh(), Aside(term), nn.Tanh()]
    pipeline = pipe(nn.Sequential(*layers).double(), chunks=1)
    y = pipeline(rows(7))
    kept = kept_by(pipeline, 2)
    if kept.requires_grad:  # a forward that will be recomputed has no graph
        kept.backward()

        with pytest.raises(RuntimeError, match=f"must be handed out of its layer: .* for {where}"):
            a_loss(y if "backward" in then else pipeline(rows(7))).backward()
    del y
    a_loss(pipeline(rows(7))).backward()


@every_mode
@pytest.mark.parametrize("term, where", TERMS, ids=["parameter", "input"])
def test_term_in_an_attribute_after_the_backward_of_the_output(
    pipe: Pipe, term: Callable[[nn.Linear, Tensor], Tensor], where: str
) -> None:
    layers = [nn.Linear(3, 3), nn.Tanh(), Aside(term), nn.Tanh()]
    pipeline = pipe(nn.Sequential(*layers).double())
    a_loss(pipeline(rows(7))).backward()

    with pytest.raises(RuntimeError, match=f"must be handed out of its layer: .* for {where}"):
        kept_by(pipeline, 2).backward()


@every_mode
def test_outputs_that_a_hook_stores(pipe: Pipe) -> None:
    pipeline = pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), [1, 2])
    features: list[Tensor] = []
    pipeline[2].register_forward_hook(lambda module, args, output: features.append(output))
    y = pipeline(rows(7))
    loss = a_loss(y) + torch.cat(features).mean()

    with pytest.raises(RuntimeError, match=r"handed out of its layer: .* write loss_term\("):
        loss.backward()


@every_mode
def test_outputs_that_a_hook_stores_later(pipe: Pipe) -> None:
    pipeline = pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), [1, 2])
    for _ in range(2):
        a_loss(pipeline(rows(7))).backward()
    features: list[Tensor] = []
    pipeline[2].register_forward_hook(lambda module, args, output: features.append(output))
    y = pipeline(rows(7))
    loss = a_loss(y) + torch.cat(features).mean()

    with pytest.raises(RuntimeError, match="a second time|handed out"):
        loss.backward()


@every_mode
def test_what_a_layer_keeps_for_its_user_to_look_at_is_no_term(pipe: Pipe) -> None:
    plain = nn.Sequential(Aside(TERMS[1][0]), nn.Tanh(), Aside(TERMS[0][0])).double()
    pipeline = pipe(plain, copy=False, stages=3)

    for _ in range(3):
        pipeline.zero_grad()
        a_loss(pipeline(rows(7))).backward()
        assert kept_by(pipeline, 2).item() > 0


def added_mean(linear: nn.Linear, y: Tensor) -> None:
    loss_term("activity", y.square().mean())


def added_weights(linear: nn.Linear, y: Tensor) -> None:
    loss_term("decay", linear.weight.square().sum())


def by_fill_drain(pipeline: GPipe) -> None:
    run(pipeline)


def by_micro_batch(pipeline: GPipe) -> None:
    def step(x: Tensor) -> Tensor:
        with collect_loss_terms() as terms:
            output = pipeline(x)
        return output.square().mean() + all_terms(terms)

    outcome = pipeline.by_micro_batch(step, rows(7))
    assert outcome.loss is not None
    outcome.loss.backward()


@every_mode
@pytest.mark.parametrize("go", [by_fill_drain, by_micro_batch])
def test_mean_that_would_be_added_up(pipe: Pipe, go: Callable[[GPipe], None]) -> None:
    with pytest.raises(ValueError, match="must be a sum: got a mean for 'activity'"):
        go(pipe(model(added_mean), chunks=3))

    go(pipe(model(added_mean), chunks=1))


@every_mode
@pytest.mark.parametrize("go", [by_fill_drain, by_micro_batch])
def test_sum_over_weights(pipe: Pipe, go: Callable[[GPipe], None]) -> None:
    """It is added up as often as there are micro-batches."""
    pipeline = pipe(model(added_weights), chunks=3)

    with pytest.warns(UserWarning, match="'decay' is the same for all micro-batches"):
        go(pipeline)


@pytest.mark.parametrize("go", [by_fill_drain, by_micro_batch])
def test_sums_of_zero(pipe: Pipe, go: Callable[[GPipe], None]) -> None:
    go(pipe(model(lambda linear, y: loss_term("none", 0 * y.sum())), chunks=3))

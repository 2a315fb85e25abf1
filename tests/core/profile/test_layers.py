"""The costs of layers are measured one by one, which leaves no trace.

Here are also the tests of ``counting``, ``meters``, ``rounds`` and ``single_layer``.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import groupby
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import profile, whole
from tests.support.clocks import Between, Clock, Looped, Takes
from tests.support.skip_layers import pair

ROWS, WIDTH = 8, 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.replace(monkeypatch)
    return clock


def batch(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


KINDS: dict[str, Any] = {
    "sequential": (lambda *layers: nn.Sequential(*layers), None),
    "blocks": (Looped, "blocks"),
    "traced": (Between, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_times_of_layers(kind: str, clock: Clock) -> None:
    build, path = KINDS[kind]
    layers = [Takes(clock, 1.0, 2.0), Takes(clock, 3.0, 1.0, fixed=8.0), Takes(clock, 0.5)]

    costs = profile(build(*layers), batch(), module=path, chunks=2)

    assert (costs.rows, costs.chunks, costs.unit, costs.device) == (4, 2, "s", "cpu")
    times = [(x.forward.at(1), x.dropping.at(1), x.backward.at(1)) for x in costs.layers]
    assert times == [(1, 1, 2), (11, 11, 9), (0.5, 0.5, 0)]
    assert [layer.time(4) for layer in costs.layers] == [12, 32, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_layers(kind: str) -> None:
    build, path = KINDS[kind]
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]

    costs = profile(build(*layers), batch(), module=path, chunks=2, optimizer=torch.optim.Adam)

    row, weights = 4 * WIDTH, 4 * (WIDTH * WIDTH + WIDTH)
    # A linear saves its input, a ReLU its output, which is the input of the second linear.
    assert [layer.saved.at(1) for layer in costs.layers] == [row, row, 0]
    assert [(c.maker, c.user, c.size.at(2)) for c in costs.carried] == [
        (0, 1, 2 * row),
        (1, 2, 2 * row),
    ]
    assert [layer.parameters for layer in costs.layers] == [20, 0, 20]
    assert [layer.held_bytes for layer in costs.layers] == [4 * weights + 8, 0, 4 * weights + 8]
    assert costs.around.parameters == (0 if path is None else 20 + 10)


def test_shared_parameter_counts_for_the_first_layer() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight

    costs = profile(nn.Sequential(first, second), batch())

    assert [layer.parameters for layer in costs.layers] == [20, 4]


def test_frozen_layers_have_no_gradients() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[0].requires_grad_(False)

    costs = profile(layers, batch(), optimizer=torch.optim.Adam)

    frozen, trained = costs.layers
    assert (frozen.gradient_bytes, frozen.optimizer_bytes, frozen.backward.at(8)) == (0, 0, 0)
    assert frozen.saved.at(8) == 0
    assert trained.gradient_bytes == 80


def test_skip_tensors_are_carried_to_the_layer_that_pops_them() -> None:
    stash, pop = pair()
    layers = nn.Sequential(stash, nn.Linear(WIDTH, WIDTH), nn.Tanh(), pop)

    costs = profile(layers, batch(), chunks=2)

    carried = {(c.maker, c.user): c.size.at(1) for c in costs.carried}
    assert carried == {(0, 1): 16, (0, 3): 16, (1, 2): 16, (2, 3): 16}


def test_values_that_every_micro_batch_gets_whole() -> None:
    class Adds(nn.Module):
        def forward(self, inputs: Any) -> Any:
            x, y = inputs
            return x + y, y

    costs = profile(nn.Sequential(Adds(), Adds()), (batch(), whole(batch(1))), chunks=2)

    (carried,) = costs.carried
    assert (carried.size.fixed, carried.size.per_row) == (16, 16)


@pytest.mark.parametrize("model_on", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_counted_on_the_meta_device(kind: str, model_on: str) -> None:
    build, path = KINDS[kind]
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)]
    model = build(*layers).to(model_on)

    costs = profile(model, batch(), module=path, device="meta", chunks=2)

    product = 2 * WIDTH * 2 * WIDTH  # for each row
    first = product if path is None else 2 * product  # of the embedding's output too
    assert (costs.unit, costs.device) == ("FLOP", "meta")
    assert [layer.forward.at(1) for layer in costs.layers] == [product, 0, product]
    assert [layer.dropping.at(1) for layer in costs.layers] == [product, 0, product]
    assert [layer.backward.at(1) for layer in costs.layers] == [first, 0, 2 * product]
    assert [layer.saved.at(1) for layer in costs.layers] == [4 * WIDTH, 8 * WIDTH, 0]
    assert all(parameter.device.type == model_on for parameter in model.parameters())


class Counts(nn.Module):
    """Changes whatever a layer may change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor
        self.average = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.average.lerp_(torch.ones_like(self.average), 0.1)
        self.calls += 1
        return x


def state_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {key: value.clone() for key, value in model.state_dict().items()}
    found["grads"] = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    found["modes"] = [module.training for module in model.modules()]
    found["ids"] = [id(x) for x in (*model.parameters(), *model.buffers())]
    found["hooks"] = [len(module._forward_hooks) for module in model.modules()]
    found["attributes"] = [sorted(vars(module)) for module in model.modules()]
    found["calls"] = [m.calls for m in model.modules() if isinstance(m, Counts)]
    found["random"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_profiling_leaves_no_trace(kind: str, device: str) -> None:
    build, path = KINDS[kind]
    model = build(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counts(), nn.Dropout(), nn.Linear(4, 4)
    )
    model(batch()).sum().backward()
    fired: list[Tensor] = []
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.register_hook(fired.append)
        parameter.register_post_accumulate_grad_hook(fired.append)
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()
    plain = deepcopy(model)
    before = state_of(model)

    profile(model, batch(), module=path, device=device, chunks=2)

    after = state_of(model)
    for name, value in before.items():
        same = torch.equal(after[name], value) if isinstance(value, Tensor) else None
        assert str(after[name]) == str(value) if same is None else same, name
    assert not fired
    torch.testing.assert_close(model(batch()), plain(batch()), rtol=0, atol=0)


def test_profiling_where_gradients_are_disabled() -> None:
    with torch.no_grad():
        costs = profile(nn.Sequential(nn.Linear(WIDTH, WIDTH)), batch())

    assert costs.layers[0].saved.at(1) == 16


def test_inputs_stay_as_they_are() -> None:
    x = batch().requires_grad_()

    profile(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), x.detach())
    profile(nn.Sequential(nn.Linear(WIDTH, WIDTH)), x)

    assert torch.equal(x, batch()) and x.grad is None


def test_batch_norms_get_two_rows() -> None:
    costs = profile(nn.Sequential(nn.BatchNorm1d(WIDTH)), batch(), chunks=8)

    assert (costs.rows, costs.chunks) == (2, 4)


# What cannot be profiled.


@pytest.mark.parametrize("kind", KINDS)
def test_layer_that_rejects_its_input_is_named(kind: str) -> None:
    build, path = KINDS[kind]
    model = build(nn.Tanh(), nn.Linear(7, WIDTH))

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        profile(model, batch(), module=path)

    if kind != "blocks":  # it was rehearsed before it was measured
        (note,) = raised.value.__notes__[-1:]
        assert "(Linear), which ran by itself on a micro-batch of 4 rows, on cpu" in note


def test_layer_that_cannot_run_alone_is_named() -> None:
    class Expects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < ROWS:
                raise ValueError("the whole batch, please")
            return x

    with pytest.raises(ValueError, match="the whole batch, please") as raised:
        profile(nn.Sequential(nn.Tanh(), Expects()), batch(), chunks=2)

    assert "raised in layer 1 (Expects)" in str(raised.value.__notes__)


def test_sample_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor with a batch dimension"):
        profile(nn.Sequential(nn.Tanh()), torch.tensor(1.0))


def test_sample_with_which_no_block_is_called_is_refused() -> None:
    class Sometimes(Looped):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.size(0) > 4 else super().forward(x)

    with pytest.raises(RuntimeError, match="must call the blocks|must reach what is balanced"):
        profile(Sometimes(nn.Linear(4, 4), nn.Linear(4, 4)), batch(), module="blocks")


def test_no_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="got sample=None. Write sample=x"):
        profile(nn.Sequential(nn.Tanh()), None)


def test_model_that_cannot_be_cut_everywhere_says_so() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x)) if self.training else self.one(self.other(x))

    with pytest.raises((TypeError, ValueError), match="in the same order") as raised:
        profile(Turned(), batch())

    assert "a stage of its own, to be measured" in str(raised.value.__notes__)


def test_layers_that_are_alike_are_counted_once_on_the_meta_device() -> None:
    calls = []

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(8, width)
            self.back = nn.Linear(width, 8)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.linear.out_features)
            return x + self.back(self.linear(x).relu())

    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for width in [16] * 20 + [32] + [16] * 20))
    found = profile(model, torch.zeros(12, 8, device="meta"), chunks=2)

    assert len(calls) < 20
    widths = [16] * 20 + [32] + [16] * 20
    assert [each.forward.at(6) for each in found.layers] == [2 * 2 * 6 * 8 * w for w in widths]
    assert len({layer.saved for layer in found.layers[1:20]}) == 1


def test_layers_are_measured_in_turn() -> None:
    ran: list[int] = []

    class Runs(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(WIDTH, WIDTH)
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            ran.append(self.number)
            return super().forward(x)

    layers = nn.Sequential(*(Runs(number) for number in range(3)))

    profile(layers, batch(), chunks=2)

    rounds = [number for number, _ in groupby(ran)]
    assert len(rounds) >= 3 * 3
    assert rounds == [0, 1, 2] * (len(rounds) // 3)


@pytest.mark.parametrize("chunks", [1, 4])
def test_backward_is_the_mean_over_a_mini_batch(clock: Clock, chunks: int) -> None:
    class AddsUp(Takes):
        """Takes three seconds more to add to a gradient than to make one."""

        def pass_time(self, per_row: float, rows: int) -> None:
            adds = per_row == self.backward_time and self.weight.grad is not None
            clock.now += 3.0 * adds
            super().pass_time(per_row, rows)

    costs = profile(nn.Sequential(AddsUp(clock, 1.0, 2.0)), batch(8 * chunks), chunks=chunks)

    (layer,) = costs.layers
    assert layer.forward.at(8) == 8
    assert layer.backward.at(8) == 16 + 3 * (chunks - 1) / chunks


# Forwards of a layer: to count, and in a round, by rows: with the fewest, two backwards are timed.
COUNTED, TIMED = 2, {2: 2, 1: 3}


@pytest.mark.parametrize(
    "seconds, factors, rounds",
    [
        (1e-3, [1.0], 2),
        (1e-3, [1.0, 9.0, 1.0], 3),
        (1e-6, [1.0, 9.0, 5.0, 3.0, 7.0], 9),
        (1.0, [1.0, 9.0, 5.0, 3.0, 7.0], 3),
    ],
    ids=["equal", "outlier", "noise", "noise of a slow layer"],
)
def test_number_of_rounds(seconds: float, factors: list[float], rounds: int, clock: Clock) -> None:
    """As many as it takes until the times agree, and no more than a budget of time allows."""
    ran: dict[int, list[float]] = {2: [], 1: []}  # by rows

    class Varies(Takes):
        def forward(self, x: Tensor) -> Tensor:
            number = max(0, len(ran[len(x)]) - COUNTED) // TIMED[len(x)]
            self.forward_time = seconds * factors[number % len(factors)]
            ran[len(x)].append(self.forward_time)
            return super().forward(x)

    costs = profile(nn.Sequential(Varies(clock, seconds)), batch(2), chunks=1)

    measured = ran[2][COUNTED :: TIMED[2]]
    assert len(measured) == rounds
    (layer,) = costs.layers
    assert layer.forward.at(2) == pytest.approx(2 * median(measured))


def test_size_that_is_known_is_not_measured_again(clock: Clock) -> None:
    """Micro-batches of one row take another time in each round; those of two do not."""
    ran: list[int] = []

    class Varies(Takes):
        def forward(self, x: Tensor) -> Tensor:
            round_ = max(0, ran.count(1) - COUNTED) // TIMED[1]
            factors = [1.0, 9.0, 5.0, 3.0, 7.0] if len(x) == 1 else [1.0]
            self.forward_time = 1e-6 * factors[round_ % len(factors)]
            ran.append(len(x))
            return super().forward(x)

    profile(nn.Sequential(Varies(clock, 1e-6)), batch(2), chunks=1)

    assert ran.count(1) == COUNTED + 9 * TIMED[1]
    assert ran.count(2) == COUNTED + 2 * TIMED[2]


def test_layers_that_differ_need_not_be_known_one_by_one(clock: Clock) -> None:
    """Each of forty takes 1.3 times as long in every other round; together they are known in two.

    Once as many rounds ran as a single one of them needs, four times as long as was allowed.
    """
    ran: list[tuple[int, int]] = []

    class Varies(Takes):
        def forward(self, x: Tensor) -> Tensor:
            width, rows = len(self.weight), len(x)
            round_ = (ran.count((width, rows)) - COUNTED) // TIMED[rows]
            self.forward_time = 1.3 if (round_ + width) % 2 else 1.0
            ran.append((width, rows))
            return super().forward(x)

    layers = nn.Sequential(*(Varies(clock, 1.0, width=1 + k) for k in range(40)))
    profile(layers, batch(2), chunks=1)

    for rows, timed in TIMED.items():
        assert {ran.count((1 + k, rows)) for k in range(40)} == {COUNTED + 2 * timed}

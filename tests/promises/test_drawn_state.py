"""Transparency: drawn layers keep state of all kinds, and change it in some or all micro-batches.

A pipeline computes what the layers compute on one micro-batch after another, and leaves the same
state, or refuses a change that it could not undo before a recomputation. The suite draws a few
cases, always the same; ``make soak`` thousands of new ones.
"""

import random
import re
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import assert_same, gradients, rows

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

REFUSED = re.compile("in every forward or in none|buffers must not be edited between")
WHEN = {"always": 1, "sometimes": 3, "seldom": 7}  # every one of so many, by the rows


class Notes:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.last = 0.0
        self.all: list[float] = []


class Kind(NamedTuple):
    """A kind of state, as functions of the layer that has it."""

    make: Callable[[Any], Any]
    read: Callable[[Any], float]
    write: Callable[[Any, float], Any]


def _zeros(size: int = 2) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)


def _frozen(layer: Any) -> None:
    layer.state = nn.Parameter(_zeros(), requires_grad=False)


def _edit_frozen(layer: Any, value: float) -> None:
    with torch.no_grad():
        layer.state.add_(value)


def _renew_list(layer: Any, value: float) -> None:
    if layer.state is None or len(layer.state) > 2:
        layer.state = []
    layer.state.append(value)


def _renew_notes(layer: Any, value: float) -> None:
    if len(layer.state.all) > 2:
        layer.state = Notes()
    layer.state.last = value
    layer.state.all.append(value)


def _renew_first_notes(layer: Any, value: float) -> None:
    layer.state[0].last += value
    if layer.state[0].last > 2:
        layer.state = [Notes()]


def _note(layer: Any, value: float) -> None:
    layer.state.last = value
    layer.state.all.append(value)


def _come_and_go(layer: Any, value: float) -> None:
    if hasattr(layer, "passing"):
        del layer.passing
    else:
        layer.passing = value


def _name_twice(layer: Any) -> None:
    layer.state = layer.other = []


def _exchange(layer: Any, value: float) -> None:
    layer.state, layer.other = layer.other, layer.state
    layer.state.append(value)


def _renew_generator(layer: Any, value: float) -> None:
    layer.state = np.random.default_rng(int(1000 * value))


def set_to(make: Callable[[], Any]) -> Callable[[Any], None]:
    """Let a layer begin with a new object as its state."""

    def begin(layer: Any) -> None:
        layer.state = make()

    return begin


KINDS = {
    "number": Kind(
        set_to(lambda: 0),
        lambda layer: layer.state,
        lambda layer, value: setattr(layer, "state", layer.state + 1),
    ),
    "attribute that comes and goes": Kind(
        set_to(lambda: None), lambda layer: getattr(layer, "passing", 0.0), _come_and_go
    ),
    "list": Kind(
        set_to(list), lambda layer: len(layer.state), lambda layer, value: layer.state.append(value)
    ),
    "long list": Kind(
        set_to(lambda: [0.0] * 100),
        lambda layer: layer.state[-1],
        lambda layer, value: layer.state.append(value),
    ),
    "elements": Kind(
        set_to(lambda: [0.0, 0.0]),
        lambda layer: layer.state[0],
        lambda layer, value: layer.state.__setitem__(int(10 * value) % 2, value),
    ),
    "new list": Kind(set_to(lambda: None), lambda layer: len(layer.state or []), _renew_list),
    "exchanged lists": Kind(
        lambda layer: layer.__dict__.update(state=[1.0], other=[2.0, 3.0]),
        lambda layer: layer.state[0] + len(layer.state),
        _exchange,
    ),
    "list under two names": Kind(
        _name_twice,
        lambda layer: len(layer.other),
        lambda layer, value: layer.state.append(value),
    ),
    "list in a tuple": Kind(
        set_to(lambda: ([],)),
        lambda layer: len(layer.state[0]),
        lambda layer, value: layer.state[0].append(value),
    ),
    "list in a dict": Kind(
        set_to(lambda: {"all": [0.0]}),
        lambda layer: layer.state["all"][0],
        lambda layer, value: layer.state["all"].__setitem__(0, value),
    ),
    "dict": Kind(
        set_to(dict),
        lambda layer: sum(layer.state.values()),
        lambda layer, value: layer.state.update({int(100 * value) % 5: value}),
    ),
    "set": Kind(
        set_to(set),
        lambda layer: len(layer.state),
        lambda layer, value: layer.state.add(int(10 * value)),
    ),
    "deque": Kind(
        set_to(lambda: deque(maxlen=2)),
        lambda layer: sum(layer.state),
        lambda layer, value: layer.state.append(value),
    ),
    "object": Kind(set_to(Notes), lambda layer: layer.state.last + len(layer.state.all), _note),
    "new object": Kind(
        set_to(Notes), lambda layer: layer.state.last + len(layer.state.all), _renew_notes
    ),
    "object in a dict": Kind(
        set_to(lambda: {"notes": Notes()}),
        lambda layer: layer.state["notes"].last,
        lambda layer, value: setattr(layer.state["notes"], "last", value),
    ),
    "new object in a list": Kind(
        set_to(lambda: [Notes()]),
        lambda layer: layer.state[0].last,
        _renew_first_notes,
    ),
    "array": Kind(
        set_to(lambda: np.zeros(3)),
        lambda layer: float(layer.state.sum()),
        lambda layer, value: layer.state.__setitem__(int(10 * value) % 3, value),
    ),
    "tensor": Kind(
        set_to(_zeros),
        lambda layer: float(layer.state.sum()),
        lambda layer, value: layer.state.add_(value),
    ),
    "new tensor": Kind(
        set_to(_zeros),
        lambda layer: float(layer.state.sum()),
        lambda layer, value: setattr(layer, "state", layer.state + value),
    ),
    "buffer": Kind(
        lambda layer: layer.register_buffer("state", _zeros()),
        lambda layer: float(layer.state.sum()),
        lambda layer, value: layer.state.add_(value),
    ),
    "large buffer": Kind(
        lambda layer: layer.register_buffer("state", _zeros(2**18)),
        lambda layer: float(layer.state[0]),
        lambda layer, value: layer.state[:1].add_(value),
    ),
    "new buffer": Kind(
        lambda layer: layer.register_buffer("state", _zeros()),
        lambda layer: float(layer.state.sum()),
        lambda layer, value: setattr(layer, "state", layer.state + value),
    ),
    "frozen parameter": Kind(_frozen, lambda layer: float(layer.state.sum()), _edit_frozen),
    "attribute of a submodule": Kind(
        set_to(nn.Identity),
        lambda layer: getattr(layer.state, "last", 0.0),
        lambda layer, value: setattr(layer.state, "last", value),
    ),
    "generator of PyTorch": Kind(
        set_to(lambda: torch.Generator().manual_seed(1)),
        lambda layer: float(torch.rand((), generator=layer.state)),
        lambda layer, value: None,
    ),
    "generator of Python": Kind(
        set_to(lambda: random.Random(1)),
        lambda layer: layer.state.random(),
        lambda layer, value: layer.state.random(),
    ),
    "new generator": Kind(
        set_to(lambda: np.random.default_rng(1)),
        lambda layer: layer.state.random(),
        _renew_generator,
    ),
}
IN_PLACE = "buffer", "large buffer", "new buffer", "frozen parameter", "attribute of a submodule"


class Keeps(nn.Linear):
    """Scales its output by a state, which it changes afterwards or before."""

    def __init__(self, kind: str, when: str, *, before: bool) -> None:
        super().__init__(3, 3)
        self.kind, self.every, self.before = kind, WHEN[when], before
        KINDS[kind].make(self)

    def forward(self, x: Tensor) -> Tensor:
        value = float(x.detach().abs().mean())
        kind = KINDS[self.kind]
        changes = int(1000 * value) % self.every == 0
        if self.before and changes:
            kind.write(self, value)
        y = super().forward(x) * (1 + 0.1 * kind.read(self))
        if not self.before and changes:
            kind.write(self, value)
        return y.tanh()


class Case(NamedTuple):
    """Layers, by kind, how often they change it, and whether before they use it; how they run."""

    layers: list[tuple[str, str, bool]]
    balance: list[int]
    chunks: int
    mode: ActivationCheckpointing
    by_micro_batch: bool
    renewed: bool  # whether the user gives layers new state before the third step
    evaluated: bool  # whether there is a forward without gradients before the second
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case."""
    layer = st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(WHEN)), st.booleans())
    layers = draw(st.lists(layer, min_size=2, max_size=4))
    first = draw(st.integers(1, len(layers) - 1))
    return Case(
        layers,
        [first, len(layers) - first],
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["always", "except_last", "never", 1])),
        by_micro_batch=draw(st.booleans()),
        renewed=draw(st.booleans()),
        evaluated=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def train(run: Callable[[Tensor], None], layers: Any, case: Case) -> list[dict[str, Any]]:
    """The gradients of four steps."""
    found = []
    for step in range(4):
        x = rows(8, seed=4 * case.seed + step).detach()
        if case.renewed and step == 2:
            for layer in layers:
                if layer.kind not in IN_PLACE:
                    KINDS[layer.kind].make(layer)
        if case.evaluated and step == 1:
            with torch.no_grad():
                run(x)
        layers.zero_grad()
        run(x)
        found.append(gradients(layers))
    return found


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum(dim=1).mean()


@given(case=cases())
def test_drawn_state(case: Case) -> None:
    torch.manual_seed(case.seed)
    plain = nn.Sequential(*(Keeps(kind, when, before=x) for kind, when, x in case.layers)).double()
    layers = deepcopy(plain)
    options: Any = {"devices": ["cpu"] * 2, "activation_checkpointing": case.mode}
    pipeline = GPipe(layers, case.balance, chunks=case.chunks, **options)

    def run_plainly(x: Tensor) -> None:
        pieces = x.tensor_split(case.chunks)
        if case.by_micro_batch and torch.is_grad_enabled():
            for each in pieces:
                (loss_of(plain(each)) * len(each) / len(x)).backward()
            return
        loss = loss_of(torch.cat([plain(each) for each in pieces]))
        if torch.is_grad_enabled():
            loss.backward()

    def run_piped(x: Tensor) -> None:
        if case.by_micro_batch and torch.is_grad_enabled():
            loss = pipeline.by_micro_batch(lambda each: loss_of(pipeline(each)), x).loss
        else:
            loss = loss_of(pipeline(x))
        if loss is not None and torch.is_grad_enabled():
            loss.backward()

    expected = train(run_plainly, plain, case)
    try:
        found = train(run_piped, layers, case)
        assert_same(found, expected)
    except RuntimeError as error:
        if not REFUSED.search(str(error)):
            raise
    finally:
        pipeline.close()

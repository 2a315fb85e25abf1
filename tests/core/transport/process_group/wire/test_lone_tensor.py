"""A value that is one tensor goes as integers, and arrives as any other value does."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpipe.core.data import LEAF_SPEC, FlatTree, whole
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.process_group.wire.lone_tensor import LoneTensor
from lightning_gpipe.core.transport.process_group.wire.message import Mail
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import DenseForm

TO = Action(Kind.BACKWARD, 3, 1)
PICKLE = pickle.PROTO[0]  # the first byte of each


def arrived(mail: Mail) -> tuple[Mail, bool]:
    """What arrives, and whether it was pickled."""
    body, contents = mail.encode()

    def fill(room: Tensor) -> None:
        room.copy_(contents.pop(0))

    return Mail.decode(body, fill), body[0] == PICKLE


@pytest.mark.parametrize("kind", Kind, ids=str)
@pytest.mark.parametrize("route", [None, 0, 7])
@pytest.mark.parametrize("spec", [LEAF_SPEC, None])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("on_device", [[], [False], [True]], ids=str)
def test_tensor_arrives_with_all_that_belongs_to_it(
    kind: Kind, route: int | None, spec: Any, requires_grad: bool, on_device: list[bool]
) -> None:
    x = torch.randn(2, 3, requires_grad=requires_grad)
    sent = Mail(Action(kind, 5, -1), route, FlatTree([x], spec), on_device)

    came, is_pickled = arrived(sent)

    assert not is_pickled
    assert (came.to, came.route, came.on_device) == (sent.to, route, on_device)
    assert came.value.spec is spec
    assert torch.equal(came.value.leaves[0], x)
    assert came.value.leaves[0].requires_grad == requires_grad
    assert came.value.leaves[0].is_leaf


@pytest.mark.parametrize(
    "leaves",
    [
        [],
        [None],
        ["text"],
        [torch.ones(1), torch.ones(1)],
        [torch.ones(1, dtype=torch.uint8)],
        [torch.eye(2).to_sparse()],
        [whole(torch.ones(2))],
    ],
    ids=str,
)
def test_other_values_are_pickled(leaves: list[Any]) -> None:
    assert arrived(Mail(TO, None, FlatTree(leaves)))[1]


def test_tensor_for_a_connection_with_a_name_is_pickled() -> None:
    route = Route(SkipName(None, "name"), 0, 1)

    came, is_pickled = arrived(Mail(TO, route, FlatTree([torch.ones(2)])))

    assert is_pickled
    assert came.route == route


NUMBERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=6)


@given(NUMBERS, st.booleans(), st.lists(st.integers(0, 9), max_size=5), st.none() | st.just((1, 0)))
def test_every_form(
    numbers: list[int], requires_grad: bool, size: list[int], gpus: tuple[int, int] | None
) -> None:
    form = DenseForm(torch.bfloat16, tuple(size), tuple(size[::-1]), (1,) * len(size), gpus)
    lone = LoneTensor(tuple(numbers), requires_grad, form)

    assert LoneTensor.decode(lone.encode()) == lone


def test_pickle_is_something_else() -> None:
    assert LoneTensor.decode(pickle.dumps(None, pickle.HIGHEST_PROTOCOL)) is None

"""What is moved, and what stays; the meta device stands in for a second one."""

import pytest
import torch

from lightning_gpipe.core.transport.copies import Copies
from tests.support.transports import layout_of

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def copies() -> Copies:
    return Copies(layout_of(2, [CPU, META]))


def test_on_one_device_nothing_is_touched(copies: Copies) -> None:
    leaves = [torch.ones(2), None, "name"]

    sent, ready = copies.send(leaves, CPU, CPU)

    assert sent is leaves
    assert ready is None


@pytest.mark.parametrize("requires_grad", [True, False])
def test_tensor_moves_as_a_leaf_that_requires_a_gradient_as_before(
    copies: Copies, requires_grad: bool
) -> None:
    x = torch.ones(2, requires_grad=requires_grad)

    (moved, number), ready = copies.send([x, 3], CPU, META)

    assert moved.device == META
    assert moved.is_leaf
    assert moved.requires_grad == requires_grad
    assert number == 3
    assert ready is None


def test_what_a_layer_put_on_another_device_stays_there(copies: Copies) -> None:
    x, lengths = torch.ones(2), torch.ones(2)
    gpu = torch.device("cuda", 0)  # where the sender is: neither leaf is

    leaves, ready = copies.send([x, lengths], gpu, META)

    assert leaves[0] is x
    assert leaves[1] is lengths
    assert ready is None


def test_the_callers_input_moves_from_wherever_it_is(copies: Copies) -> None:
    (x, y), _ = copies.send([torch.ones(2), torch.ones(2, device="meta")], None, META)

    assert x.device == META
    assert y.device == META

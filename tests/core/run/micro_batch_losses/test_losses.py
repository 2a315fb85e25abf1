from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.faithful import Streams
from lightning_gpipe.core.run.micro_batch_losses.losses import Losses, with_known_gradients


def total(losses: Losses, results: Sequence[object]) -> tuple[float, list[float], float]:
    """The loss, where each backward starts from, and what all of them amount to."""
    seeds = []
    for i, result in enumerate(results):
        step = losses.add(i, result)
        seeds.append(0.0 if step is None else float(step[1]))
    of_all = losses.total()
    assert of_all is not None
    return float(of_all.value), seeds, float(of_all.seed)


def loss(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_weighted_by_rows() -> None:
    value, seeds, seed = total(Losses(3, [3, 2, 2]), [loss(1.0), loss(2.0), loss(4.0)])

    assert value == pytest.approx((3 * 1 + 2 * 2 + 2 * 4) / 7)
    assert seeds == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert seed == pytest.approx(1.0)


def test_weighted_by_what_the_step_says() -> None:
    results = [{"loss": loss(1.0), "loss_weight": 10}, {"loss": loss(3.0), "loss_weight": 30}]
    value, seeds, seed = total(Losses(2, [3, 3]), results)

    assert value == pytest.approx(2.5)
    # Estimated to add up to 20, which is 40.
    assert seeds == pytest.approx([0.5, 1.5])
    assert seed == pytest.approx(2.0)


def test_first_weight_is_zero() -> None:
    nothing = torch.tensor(float("nan"), dtype=torch.float64, requires_grad=True)
    results = [
        {"loss": nothing, "loss_weight": torch.tensor(0)},
        {"loss": loss(3.0), "loss_weight": torch.tensor(4)},
    ]
    value, seeds, seed = total(Losses(2, None), results)

    assert value == 3.0
    assert seeds == pytest.approx([0.0, 0.5])
    assert seed == pytest.approx(0.5)


def test_scale() -> None:
    scale = torch.tensor(1024.0)
    value, seeds, seed = total(Losses(2, [1, 1], scale), [loss(1.0), loss(2.0)])

    assert value == 1.5
    assert seeds == [512.0, 512.0]
    assert seed == 1024.0


def test_each_backward_starts_from_a_tensor_of_its_own() -> None:
    """A hook may edit its gradient in place."""
    losses = Losses(3, [1, 1, 1])

    for i, result in enumerate([loss(1.0), loss(2.0), loss(4.0).reshape(1)]):
        step = losses.add(i, result)
        assert step is not None
        seed = step[1]
        assert seed.shape == result.shape and float(seed) == pytest.approx(1 / 3)
        seed.zero_()


def test_negative_weight() -> None:
    with pytest.raises(ValueError, match=r"'loss_weight' must be 0 or more: got -1.0"):
        Losses(1, None).add(0, {"loss": loss(1.0), "loss_weight": -1})


def test_unknown_rows() -> None:
    with pytest.raises(ValueError, match=r"has no division\(\)"):
        Losses(2, None).add(0, loss(1.0))


def test_shape_and_type_of_a_loss() -> None:
    losses = Losses(1, [2])
    step = losses.add(0, torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True))

    assert step is not None
    assert (step[1].shape, step[1].dtype) == ((1, 1), torch.bfloat16)
    of_all = losses.total()
    assert of_all is not None
    value = of_all.value
    assert (value.shape, value.dtype) == ((1, 1), torch.bfloat16)


@pytest.mark.parametrize("sparse", [False, True])
def test_known_gradients_are_scaled(sparse: bool) -> None:
    leaf, gradient = torch.zeros(3, 2, requires_grad=True), torch.tensor([[0.0, 0], [1, 2], [0, 0]])
    known = gradient.to_sparse() if sparse else gradient.clone()

    result = with_known_gradients(torch.tensor(7.0), [(leaf, known)], torch.tensor(0.5), Streams())
    (2 * result).backward()

    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.to_dense(), 4 * gradient)

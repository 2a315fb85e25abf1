"""Values of two runs are compared by what rounding allows."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.verify.compare import (
    Deviation,
    deviations,
    perturbed,
    same_shapes,
    tolerance_of,
)

X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def deviation(plain: Tensor | None, pipelined: Tensor | None) -> Deviation:
    (found,) = deviations({"x": plain}, {"x": pipelined})
    return found


def test_difference_is_measured_by_the_largest_value() -> None:
    assert deviation(tensor(1.0, -4.0), tensor(1.5, -4.0)) == ("x", 0.5, 0.125, "")


def test_small_value_is_measured_by_a_tenth_of_the_largest_of_its_kind() -> None:
    plain = {"zero but for rounding": tensor(1e-16), "large": tensor(2.0)}
    pipelined = {"zero but for rounding": tensor(-1e-16), "large": tensor(2.0 + 1e-15)}

    found, _ = deviations(plain, pipelined)

    assert found.relative == pytest.approx(1e-15)


def test_value_that_agrees_to_the_bit_does_not_make_others_small() -> None:
    plain = {"mask": tensor(0.0, -1e9), "mean": tensor(1.0)}
    pipelined = {"mask": tensor(0.0, -1e9), "mean": tensor(1.5)}

    mask, mean = deviations(plain, pipelined)

    assert (mask.relative, mean.relative) == (0.0, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_same_special_value_is_no_difference(value: float) -> None:
    assert deviation(tensor(value, 1.0), tensor(value, 1.0)).absolute == 0
    assert deviation(tensor(value, 1.0), tensor(2.0, 1.0)).relative == math.inf


def test_special_value_does_not_measure_others() -> None:
    assert deviation(tensor(math.inf, 1.0), tensor(math.inf, 1.5)).relative == 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    plain, pipelined = tensor(0, 1, dtype=dtype), tensor(1, 1, dtype=dtype)

    assert deviation(plain, plain).relative == 0
    assert deviation(plain, pipelined) == ("x", 1.0, math.inf, "")
    assert str(deviation(plain, pipelined)) == "differs by up to 1 where it must be equal"


@pytest.mark.parametrize(
    "plain, pipelined, expected",
    [
        (tensor(1.0), None, "is present in the plain run only"),
        (None, tensor(1.0), "is present in the pipelined run only"),
        (tensor(1, 2), tensor(1), "is float64 of shape (1,) instead of float64 of shape (2,)"),
        (
            tensor(1),
            tensor(1, dtype=torch.float32),
            "is float32 of shape (1,) instead of float64 of shape (1,)",
        ),
    ],
)
def test_values_that_cannot_be_subtracted(
    plain: Tensor | None, pipelined: Tensor | None, expected: str
) -> None:
    found = deviation(plain, pipelined)

    assert str(found) == expected
    assert found.relative == math.inf


def test_values_that_neither_run_has_are_left_out() -> None:
    assert deviations({"unused": None}, {"unused": None}) == []


def test_empty_tensor_agrees() -> None:
    assert deviation(tensor(), tensor()).absolute == 0


def test_complex_and_sparse_values() -> None:
    z = torch.tensor([3 + 4j])
    sparse = torch.eye(2).to_sparse()

    assert deviation(z, z + 1).relative == pytest.approx(0.2)
    assert deviation(sparse, sparse * 1.5).relative == pytest.approx(0.5)


def test_low_precision_is_compared_in_high() -> None:
    assert deviation(tensor(6e4, dtype=torch.float16), tensor(-6e4, dtype=torch.float16)) == (
        "x",
        12e4,
        2.0,
        "",
    )


def test_shapes_decide_what_can_be_compared() -> None:
    assert same_shapes({"x": tensor(1)}, {"x": tensor(2, dtype=torch.float32)})
    assert not same_shapes({"x": tensor(1)}, {"x": tensor(1, 2)})
    assert not same_shapes({"x": tensor(1)}, {"y": tensor(1)})


@pytest.mark.parametrize(
    "dtypes, on_cuda, expected",
    [
        ({torch.float64, torch.int64}, False, 1e-9),
        ({torch.float64}, True, 1e-9),
        ({torch.float64, torch.float32}, False, 1e-4),
        ({torch.complex64}, False, 1e-4),
        ({torch.float32}, True, 1e-2),
        ({torch.float32, torch.bfloat16}, False, 5e-2),
        ({torch.float16}, True, 5e-2),
        ({torch.float8_e4m3fn}, False, 5e-2),
        ({torch.int64}, False, 0.0),
    ],
)
def test_lowest_precision_sets_the_tolerance(
    dtypes: set[torch.dtype], on_cuda: bool, expected: float
) -> None:
    assert tolerance_of(dtypes, on_cuda=on_cuda) == expected


def test_errors_do_not_depend_on_the_order_of_the_layers() -> None:
    """Stages run on threads: with one generator for all layers, a verification differed by run."""
    layers = [nn.Identity(), nn.Identity()]
    runs: list[list[Tensor]] = []
    for order in ([0, 1], [1, 0]):
        with perturbed(layers):
            outputs = {k: layers[k](X) for k in order}
        runs.append([outputs[0], outputs[1]])

    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_errors_are_those_of_rounding() -> None:
    layer = nn.Identity()

    with perturbed([layer]):
        y = layer(X)

    assert not torch.equal(y, X)
    torch.testing.assert_close(y, X, rtol=1e-14, atol=0)
    assert torch.equal(layer(X), X)


def test_integers_stay_as_they_are() -> None:
    layer = nn.Identity()

    with perturbed([layer]):
        assert torch.equal(layer(torch.arange(3)), torch.arange(3))

"""A batch norm of several replicas computes what it would compute from the rows of all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.faithful import DeferredStatistics, Journal, over_replicas
from lightning_gpipe.core.faithful.layers.replicated_norm import Gather
from tests.support.waiting import PATIENCE

SHAPES = {
    "rows": (nn.BatchNorm1d, (3,)),
    "sequences": (nn.BatchNorm1d, (3, 5)),
    "images": (nn.BatchNorm2d, (3, 4, 2)),
}
SIZES = [[4, 4], [5, 2, 1], [8]]  # of the rows of each replica


class Exchange:
    """Lets replicas, each on a thread, gather one another's tensors."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = Barrier(size, timeout=PATIENCE)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def of(self, rank: int) -> Gather:
        def gather(own: Tensor) -> list[Tensor]:
            self._tensors[rank] = own
            self._barrier.wait()
            found = [each.clone() for each in self._tensors]
            self._barrier.wait()
            return found

        return gather


def rows(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    x = 3 + 2 * torch.randn(8, *shape, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def made(kind: str, **options: Any) -> _BatchNorm:
    norm = SHAPES[kind][0](3, **options).double()
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return norm


def deferred(norm: _BatchNorm, gather: Gather, x: Tensor) -> Tensor:
    """What a stage does in a mini-batch of one micro-batch, which it recomputes."""
    statistics = DeferredStatistics.of([norm], gather)
    assert statistics is not None
    with statistics.collecting(Journal(), record=True), torch.no_grad():
        norm(x)
    with statistics.collecting(Journal(), record=False):
        y: Tensor = norm(x)
    statistics.commit()
    return y


def at_once(norm: _BatchNorm, gather: Gather, x: Tensor) -> Tensor:
    with over_replicas([norm], gather):
        return norm(x)


def on_threads(run: Callable[[int], Tensor], size: int) -> list[Tensor]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def of_all(parts: list[Tensor | None]) -> Tensor:
    return torch.stack([part for part in parts if part is not None]).sum(0)


@pytest.mark.parametrize("way", [deferred, at_once], ids=lambda way: way.__name__)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_results_gradients_and_statistics(
    kind: str,
    options: dict[str, Any],
    sizes: list[int],
    way: Callable[[_BatchNorm, Gather, Tensor], Tensor],
) -> None:
    plain, norms = made(kind, **options), [made(kind, **options) for _ in sizes]
    whole = rows(SHAPES[kind][1])
    parts = [part.detach().requires_grad_() for part in whole.split(sizes)]
    expected = plain(whole)
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    exchange = Exchange(len(sizes))

    def run(rank: int) -> Tensor:
        y = way(norms[rank], exchange.of(rank), parts[rank])
        (y * weights.split(sizes)[rank]).sum().backward()
        return y.detach()

    found = on_threads(run, len(sizes))

    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), whole.grad)
    for name, parameter in plain.named_parameters():
        grads = [norm.get_parameter(name).grad for norm in norms]
        torch.testing.assert_close(of_all(grads), parameter.grad)
    for norm in norms:
        torch.testing.assert_close(dict(norm.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("way", [deferred, at_once], ids=lambda way: way.__name__)
def test_norm_without_running_statistics(way: Callable[..., Tensor]) -> None:
    """It normalises by the rows of all in training, and updates nothing."""
    plain, norms = (
        made("rows", track_running_stats=False),
        [made("rows", track_running_stats=False) for _ in range(2)],
    )
    whole, exchange = rows((3,)), Exchange(2)

    found = on_threads(lambda k: way(norms[k], exchange.of(k), whole.split(4)[k]), 2)

    torch.testing.assert_close(torch.cat(found), plain(whole))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """As PyTorch's: values of half the size, moments and parameters in single precision."""
    plain, norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x, own = (rows((3,), dtype).detach().requires_grad_() for _ in range(2))
    plain(x).square().sum().backward()

    y = at_once(norm, lambda tensor: [tensor], own)
    y.square().sum().backward()

    assert y.dtype == dtype
    torch.testing.assert_close(y, plain(x), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(own.grad, x.grad, rtol=5e-2, atol=5e-2)
    assert norm.running_mean is not None and norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("way", [deferred, at_once], ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_in_half_precision(dtype: torch.dtype, way: Callable[..., Tensor]) -> None:
    """Once an error of ``lerp``: moments are in single precision, and such statistics are not."""
    plain, norm = nn.BatchNorm1d(3).to(dtype), nn.BatchNorm1d(3).to(dtype)
    x = rows((3,), dtype).detach()

    y = way(norm, lambda tensor: [tensor], x)

    torch.testing.assert_close(y, plain(x), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dict(norm.named_buffers()), dict(plain.named_buffers()))


def test_evaluation_waits_for_nobody() -> None:
    norm = made("rows").eval()
    expected = norm(rows((3,)))

    assert DeferredStatistics.of([norm], None) is None
    with over_replicas([norm], lambda _: pytest.fail("it gathers")):
        torch.testing.assert_close(norm(rows((3,))), expected)


def test_frozen_input_is_not_awaited_in_backward() -> None:
    norm, calls = made("rows"), []

    def gather(tensor: Tensor) -> list[Tensor]:
        calls.append(tensor)
        return [tensor]

    with over_replicas([norm], gather):
        norm(rows((3,)).detach()).sum().backward()

    assert len(calls) == 1

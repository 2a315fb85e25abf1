from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad_mode
from torch.utils import _contextlib

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.layers import batchnorm
from lightning_gpipe.core.faithful.layers.batchnorm import (
    DeferredStatistics,
    Norm,
    check_batch_norms,
)
from lightning_gpipe.core.faithful.layers.replicated_norm import Moments, merge_moments
from tests.support.interrupts import interrupted

SHAPES = {
    "1d": (nn.BatchNorm1d, (10, 3)),
    "1d of sequences": (nn.BatchNorm1d, (10, 3, 5)),
    "2d": (nn.BatchNorm2d, (10, 3, 4, 2)),
    "3d": (nn.BatchNorm3d, (10, 3, 2, 3, 2)),
}


def moments(values: Tensor) -> Moments:
    return Moments(len(values), values.mean(0), values.var(0))


def run(bn: Norm, x: Tensor, sizes: Sequence[int]) -> None:
    """Feed ``x`` in micro-batches, each forward and then once more, as in a recomputation."""
    statistics = DeferredStatistics.of([bn])
    assert statistics is not None
    for record in (True, False):
        for microbatch in x.split(list(sizes)):
            with statistics.collecting(Journal(), record=record):
                bn(microbatch)
    statistics.commit()


@pytest.mark.parametrize(
    "sizes", [[10], [5, 5], [3, 3, 2, 2], [8, 2], [2, 2, 2, 2, 2], [7, 3]], ids=str
)
def test_merged_moments_are_those_of_all_values(sizes: list[int]) -> None:
    values = 1e4 + torch.randn(10, 3, generator=torch.Generator().manual_seed(1)).double()

    merged = merge_moments([moments(part) for part in values.split(sizes)])

    assert merged.number == 10
    torch.testing.assert_close(merged.mean, values.mean(0))
    torch.testing.assert_close(merged.variance, values.var(0))


@pytest.mark.parametrize("sizes", [[10], [5, 5], [4, 3, 3], [6, 4]], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_equal_those_of_the_whole_mini_batch(
    kind: str, affine: bool, momentum: float | None, sizes: list[int]
) -> None:
    cls, shape = SHAPES[kind]
    plain, deferred = (cls(3, momentum=momentum, affine=affine).double() for _ in range(2))
    generator = torch.Generator().manual_seed(2)

    for step in range(3):
        x = step + torch.randn(shape, generator=generator, dtype=torch.float64)
        plain(x)
        run(deferred, x, sizes)

    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(deferred.get_buffer(name), buffer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics_in_half_precision(made: type[Norm], affine: bool, dtype: torch.dtype) -> None:
    """Once each micro-batch rounded them; in float16 a sum of squares overflowed."""
    plain, deferred = (made(3, affine=affine, track_running_stats=True) for _ in range(2))
    x = torch.randn(32, 3, 600, generator=torch.Generator().manual_seed(2))
    x = (torch.tensor([[1.0], [2.0], [3.0]]) * x + 100).to(dtype)

    plain(x.float())
    run(deferred.to(dtype), x, [2] * 16)

    for name, buffer in plain.to(dtype).named_buffers():
        torch.testing.assert_close(deferred.get_buffer(name), buffer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision(dtype: torch.dtype) -> None:
    plain, deferred = nn.BatchNorm1d(3).to(dtype), nn.BatchNorm1d(3).to(dtype)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    statistics = DeferredStatistics.of([deferred])
    assert statistics is not None

    plain(x).square().sum().backward()
    with statistics.collecting(Journal(), record=True):
        deferred(x).square().sum().backward()

    for ours, theirs in zip(deferred.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=5e-2, atol=5e-2)


def test_micro_batches_are_normalised_by_themselves() -> None:
    bn, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    expected = nn.BatchNorm1d(3)(x)
    statistics = DeferredStatistics.of([bn])
    assert statistics is not None

    with statistics.collecting(Journal(), record=True):
        y = bn(x)

    torch.testing.assert_close(y, expected)


def test_buffers_move_only_when_committed() -> None:
    bn = nn.BatchNorm1d(3)
    statistics = DeferredStatistics.of([bn])
    assert statistics is not None

    with statistics.collecting(Journal(), record=True):
        bn(torch.randn(4, 3))

    assert bn.running_mean is not None
    assert torch.equal(bn.running_mean, torch.zeros(3))


def test_module_called_twice_takes_two_steps() -> None:
    plain, deferred = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    plain(x)
    plain(x * 2)

    statistics = DeferredStatistics.of([deferred])
    assert statistics is not None
    for microbatch in x.split(4):
        with statistics.collecting(Journal(), record=True):
            deferred(microbatch)
            deferred(microbatch * 2)
    statistics.commit()

    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(deferred.get_buffer(name), buffer)


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False)],
    ids=["eval", "without statistics"],
)
def test_nothing_to_defer(module: Norm) -> None:
    assert DeferredStatistics.of([module]) is None


def test_statistics_that_are_there_and_not_tracked() -> None:
    """Lightning's callbacks freeze batch norms so; once their statistics moved."""
    module = nn.BatchNorm1d(3)
    module.track_running_stats = False

    assert DeferredStatistics.of([module]) is None


def test_module_is_as_it_was_afterwards() -> None:
    bn = nn.BatchNorm1d(3)
    keys = list(bn.state_dict())

    run(bn, torch.randn(4, 3), [2, 2])

    assert list(bn.state_dict()) == keys
    assert "forward" not in vars(bn)


def test_module_is_as_it_was_after_an_error() -> None:
    bn = nn.BatchNorm1d(3)
    statistics = DeferredStatistics.of([bn])
    assert statistics is not None

    with (
        pytest.raises(ValueError, match="expected 2D or 3D"),
        statistics.collecting(Journal(), record=True),
    ):
        bn(torch.ones(3))

    assert "forward" not in vars(bn)


class Ghost(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_batch_norms_with_a_forward_of_their_own_are_refused() -> None:
    layers = [nn.BatchNorm1d(3), nn.Sequential(Ghost(3)), nn.SyncBatchNorm(3)]

    with pytest.raises(ValueError, match="deferred_batch_norm=True needs") as error:
        check_batch_norms(layers, ["layer 0", "layer 1", "layer 2"])

    assert "got Ghost in layer 1, SyncBatchNorm in layer 2." in str(error.value)
    assert "deferred_batch_norm=False" in str(error.value)


def test_plain_batch_norms_are_accepted() -> None:
    layers = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.LazyBatchNorm3d(), nn.Linear(2, 2)]
    check_batch_norms(layers, [f"layer {k}" for k in range(4)])


def test_batch_norm_with_a_patched_forward_is_refused() -> None:
    """Once the user's patch was ignored while the pipeline ran, and lost afterwards."""
    norm = nn.BatchNorm1d(2)
    norm.__dict__["forward"] = nn.Identity()

    with pytest.raises(ValueError, match="BatchNorm1d in layer 0"):
        check_batch_norms([norm], ["layer 0"])


def collected() -> tuple[list[nn.BatchNorm1d], DeferredStatistics]:
    """Two batch norms that have run on three micro-batches."""
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)]
    statistics = DeferredStatistics.of(norms)
    assert statistics is not None
    for microbatch in torch.linspace(-1, 1, 18).reshape(3, 2, 3):
        with statistics.collecting(Journal(), record=True):
            for bn in norms:
                bn(microbatch)
    return norms, statistics


def test_interrupted_commit_updates_all_statistics_or_none() -> None:
    """Once a mean was updated without its variance, and grad mode stayed off."""
    files = {str(batchnorm.__file__), str(_contextlib.__file__), str(grad_mode.__file__)}
    norms, statistics = collected()
    before = [bn.state_dict() for bn in collected()[0]]
    statistics.commit()
    after = [bn.state_dict() for bn in norms]

    at, there_was_one = 0, True
    while there_was_one:
        at += 1
        norms, statistics = collected()
        there_was_one = interrupted(statistics.commit, files, at)
        assert torch.is_grad_enabled(), f"after line {at}"
        found = str([bn.state_dict() for bn in norms])
        assert found in (str(before), str(after)), f"after line {at}"

    assert at > 10
    assert str([bn.state_dict() for bn in norms]) == str(after)

import torch
from torch import Tensor, nn

from lightning_gpipe.core.buffers import StageBuffers
from lightning_gpipe.core.pytree import Flat
from lightning_gpipe.core.snapshot import Snapshot


class State(nn.Module):
    """A buffer that moves on, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))
        self.mask = nn.Buffer(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.mask


def run(module: State, buffers: StageBuffers) -> None:
    with buffers.watched():
        module(torch.ones(2))


def test_lent_values_are_changed_in_the_buffers_stead() -> None:
    module = State()
    buffers, buffer = StageBuffers([module]), module.calls
    saved = buffers.changing()
    run(module, buffers)

    with saved.lent():
        found = module.calls.item()
        module(torch.ones(2))

    assert found == 0
    assert module.calls is buffer
    assert buffer == 1


def test_only_buffers_that_change_are_kept_once_they_are_known() -> None:
    module = State()
    buffers = StageBuffers([module])
    run(module, buffers)
    mask = module.mask

    with buffers.changing().lent():
        assert module.mask is mask
        assert module.calls == 1


def test_running_statistics_are_always_kept() -> None:
    """torch 2.13: batch_norm updates them without counting a version."""
    norm = nn.BatchNorm1d(2)
    buffers = StageBuffers([norm])
    with buffers.watched():
        norm(torch.randn(4, 2))
    mean = norm.running_mean

    with buffers.changing().lent():
        assert norm.running_mean is not mean


def test_snapshot_puts_back_buffers_and_inputs() -> None:
    module, x = State(), torch.ones(2)
    buffers, buffer = StageBuffers([module]), module.calls
    snapshot = Snapshot([buffers], [Flat([x, "name"])], guarded=False)

    module(x.mul_(2))
    [again] = snapshot.restore()

    assert module.calls is buffer
    assert buffer == 0
    assert torch.equal(again.leaves[0], torch.ones(2))
    assert again.leaves[1] == "name"


def test_snapshot_of_guarded_inputs_copies_nothing() -> None:
    inputs = [Flat([torch.ones(2)])]

    assert Snapshot([], inputs, guarded=True).restore() is inputs

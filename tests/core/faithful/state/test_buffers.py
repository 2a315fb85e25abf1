import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import Manager, together
from lightning_gpipe.core.faithful.state.behavior import Behavior
from lightning_gpipe.core.faithful.state.buffers import BufferState


class State(nn.Module):
    """A buffer that moves on, and a large one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))
        self.mask = nn.Buffer(torch.ones(2**18, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.mask


X = torch.ones(2)


class Watched:
    """What earlier runs of a module have shown."""

    def __init__(self, *, deferred: bool = False) -> None:
        self.deferred = deferred
        self.behavior = Behavior()


def run(module: nn.Module, watched: Watched, x: Tensor = X) -> BufferState:
    edited = watched.behavior.edited_buffers
    found = BufferState([module], edited=edited, deferred=watched.deferred)
    module(x)
    found.compare(watched.behavior)
    return found


def swapped_in(buffers: BufferState) -> Manager:
    return together(buffers.swapped_in(Journal()))


def test_lent_values_are_changed_in_the_buffers_stead() -> None:
    module = State()
    buffers, buffer = Watched(), module.calls
    found = run(module, buffers)

    with swapped_in(found):
        before = module.calls.item()
        module(X)

    assert before == 0
    assert module.calls is buffer
    assert buffer == 1


def test_large_buffers_are_not_copied_once_they_are_known() -> None:
    module = State()
    buffers = Watched()
    run(module, buffers)
    mask = module.mask

    with swapped_in(run(module, buffers)):
        assert module.mask is mask
        assert module.calls == 1


class Lazy(nn.Module):
    """Makes its buffers when it first runs, and new ones every time."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Tensor | None
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.late = x if self.late is None else self.late * 2
        if "later" not in self._buffers:
            self.register_buffer("later", x.clone())
        return x


def test_buffers_that_did_not_exist() -> None:
    """Once recomputation found those that forward had made, and moved them on a second time."""
    module = Lazy()
    found = run(module, Watched())

    with swapped_in(found):
        assert module._buffers == {"late": None}
        module(X)

    assert set(module._buffers) == {"late", "later"}


def test_buffers_that_are_replaced_need_no_copy() -> None:
    module = Lazy()
    buffers = Watched()
    run(module, buffers)
    old = module.late

    with swapped_in(run(module, buffers)):
        assert old is not None
        assert torch.equal(module._buffers["late"], old)  # type: ignore[arg-type]  # it is there


class Sometimes(nn.Module):
    """Edits its buffer for inputs that are large."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 5:
            self.mean.mul_(0.5)
        return x * self.mean[0]


def test_buffer_edited_for_the_first_time_in_a_later_run() -> None:
    """Once recomputation used the edited value, and edited it again: wrong gradients."""
    module = Sometimes(size=1)
    buffers = Watched()
    run(module, buffers)

    with swapped_in(run(module, buffers, X * 100)):
        assert module.mean == 1


def test_large_buffer_edited_for_the_first_time_in_a_later_run() -> None:
    module = Sometimes(size=2**19)
    buffers = Watched()
    run(module, buffers)

    with pytest.raises(RuntimeError, match="Sometimes must edit its buffer 'mean' in every"):
        run(module, buffers, X * 100)


def test_edit_from_outside_is_seen() -> None:
    module = State()
    buffers = Watched()
    run(module, buffers)
    found = run(module, buffers)
    assert found.lost is None

    module.mask.fill_(5)

    assert found.lost == (module, "mask")


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_always_copied_unless_they_are_deferred(training: bool) -> None:
    """torch 2.13: batch_norm updates them without counting a version."""
    norm = nn.BatchNorm1d(2).train(training)
    x = torch.randn(4, 2)

    for deferred in (True, False):
        if deferred and training:  # as the stage does
            vars(norm)["forward"] = nn.Identity()
        else:
            vars(norm).pop("forward", None)
        buffers = Watched(deferred=deferred)
        run(norm, buffers, x)
        mean = norm.running_mean
        with swapped_in(run(norm, buffers, x)):
            assert (norm.running_mean is mean) == (deferred and training)


def test_buffers_are_put_back_with_their_values() -> None:
    module = State()
    buffer = module.calls
    found = BufferState([module])

    module(X)
    module.calls = nn.Buffer(torch.ones(()))
    found.restore()

    assert module.calls is buffer
    assert buffer == 0


def test_buffers_that_are_known_to_be_edited_are_saved() -> None:
    module = State()
    known = BufferState([module], edited={(module, "mask")})
    unknown = BufferState([module], edited=())

    module.mask.mul_(2)

    assert known.lost is None
    assert unknown.lost == (module, "mask")
    known.restore()
    assert module.mask.max() == 1


# On Python 3.14 and later torch.jit.script is "not supported" instead of "deprecated".
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is (deprecated|not supported)")
@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.BatchNorm1d(2)])
def test_buffers_of_a_scripted_module(layer: nn.Module) -> None:
    """Its buffers are kept in C++, and their container is not a dict."""
    try:
        module = torch.jit.script(layer)
    except RuntimeError as error:  # torch.jit does not support this Python
        pytest.skip(str(error))
    found = BufferState([module])

    module(torch.randn(3, 2))
    found.restore()

    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], buffer.clone())

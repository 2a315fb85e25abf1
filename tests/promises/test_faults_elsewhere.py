"""No hang: after an error in other code of the user, the next step is correct.

That is in hooks on tensors and on what autograd saves, in an observer, in what splits and merges
batches, and of any type: errors that cannot be changed, and those that Python itself uses.

Here are also the tests of ``notes``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe import Rows
from lightning_gpipe.core.pipeline import GPipe
from tests.support.faults import Fuse, OwnError, throw
from tests.support.models import Call, assert_same_step, perceptron, rows, step
from tests.support.pipes import Pipe, every_mode, with_and_without_threads


class Trap:
    """Raises at one of its calls, once it is set.

    Attributes:
        after: How many calls it lets pass; None lets all pass.
    """

    def __init__(self) -> None:
        self.after: int | None = None

    def __call__(self, x: Any = None) -> Any:
        if self.after is not None:
            self.after -= 1
            if self.after < 0:
                self.after = None
                raise OwnError
        return x


class Trapped(Rows):
    """Has a trap where a batch is split, and one where outputs are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.splits, self.merges = Trap(), Trap()

    @override
    def split(self, batch: Any, chunks: int) -> list[Any]:
        self.splits()
        return super().split(batch, chunks)

    @override
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        self.merges()
        return super().merge(outputs, batch)


def hooked(trap: Trap) -> Callable[[Tensor], Tensor]:
    def layer(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(trap)
        return y

    return layer


@pytest.fixture
def trap() -> Trap:
    return Trap()


@pytest.fixture
def plain(trap: Trap) -> nn.Sequential:
    middle = Call(hooked(trap))
    return nn.Sequential(*perceptron(2), middle, *perceptron(2), nn.Tanh())


def assert_sound(pipeline: GPipe, plain: nn.Sequential, own: list[nn.Parameter]) -> None:
    """The modules have their own parameters, and a step is that of the plain module."""
    assert all(one is two for one, two in zip(pipeline.parameters(), own, strict=True))
    assert torch.is_grad_enabled()
    for each in (pipeline, plain):
        each.zero_grad()
    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("after", [0, 2])
def test_hook_on_a_tensor(pipe: Pipe, plain: nn.Sequential, trap: Trap, after: int) -> None:
    pipeline = pipe(plain, stages=3, copy=False)
    own = list(pipeline.parameters())

    trap.after = after
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert_sound(pipeline, nn.Sequential(*pipeline), own)


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("kind", ["pack", "unpack"])
def test_hooks_on_what_autograd_saves(pipe: Pipe, plain: nn.Sequential, kind: str) -> None:
    pipeline = pipe(plain, stages=3)
    own = list(pipeline.parameters())
    traps = {"pack": Trap(), "unpack": Trap()}

    traps[kind].after = 2
    hooks = traps["pack"], traps["unpack"]
    with pytest.raises(OwnError), torch.autograd.graph.saved_tensors_hooks(*hooks):
        step(pipeline, rows(7))

    assert_sound(pipeline, plain, own)


@with_and_without_threads
@every_mode
def test_observer(pipe: Pipe, plain: nn.Sequential) -> None:
    pipeline, trap = pipe(plain, stages=3), Trap()
    own = list(pipeline.parameters())

    handle = pipeline.observe(trap)
    trap.after = 0
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert_sound(pipeline, plain, own)
    handle.remove()


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("where", ["splits", "merges"])
def test_microbatching(pipe: Pipe, plain: nn.Sequential, where: str) -> None:
    microbatching = Trapped()
    pipeline = pipe(plain, stages=3, microbatching=microbatching)
    own = list(pipeline.parameters())

    getattr(microbatching, where).after = 0
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert_sound(pipeline, plain, own)


@with_and_without_threads
@every_mode
def test_hook_on_a_parameter(pipe: Pipe, plain: nn.Sequential) -> None:
    pipeline, trap = pipe(plain, stages=3), Trap()
    own = list(pipeline.parameters())
    handle = own[0].register_hook(trap)

    trap.after = 0
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    handle.remove()
    assert_sound(pipeline, plain, own)


# Of any type.


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses that anything is set, such as notes or a traceback."""

    reason: str


class Mute(Exception):
    """Takes no notes."""

    @override
    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


class Talkative(Exception):
    """Needs several arguments, so that it cannot be made again from its message, or pickled."""

    def __init__(self, one: int, other: Callable[[], int]) -> None:
        super().__init__(f"{one} and {other()}")


class Slotted(Exception):
    """Has slots, one of which is that of its notes."""

    __slots__ = ("__notes__",)


ERRORS = [
    Frozen("by the layer"),
    Mute("by the layer"),
    Talkative(1, lambda: 2),
    Slotted("by the layer"),
    StopIteration(3),
    GeneratorExit("by the layer"),
    SystemExit(3),
    KeyboardInterrupt("by the layer"),
    RuntimeError("generator raised StopIteration"),
]


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("at", [("forward", 1), ("backward", 1)], ids=["forward", "backward"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_of_any_type(pipe: Pipe, error: BaseException, at: tuple[str, int]) -> None:
    """Once the note of where it was raised took the place of an error that takes none."""
    fuse = Fuse()
    plain = nn.Sequential(*perceptron(2), fuse, *perceptron(3))
    pipeline = pipe(plain, stages=3, copy=False)
    own = list(pipeline.parameters())

    fuse.light(at, throw(error))
    with pytest.raises(type(error)) as caught:
        step(pipeline, rows(7))

    assert caught.value is error
    assert_sound(pipeline, nn.Sequential(*pipeline), own)

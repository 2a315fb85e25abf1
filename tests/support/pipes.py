"""The factory of pipelines for all tests, and the ways to run a pipeline that tests go through.

A test that takes ``pipe`` gets pipelines that recompute by the test's ``mode`` and run on threads
if its ``threads`` says so. Both are fixtures with the engine's defaults. :data:`every_mode` and
:data:`with_and_without_threads` run a test with each value in turn, whether it names them or not::

    @every_mode
    @with_and_without_threads
    def test_gradients(pipe: Pipe) -> None:
        plain = perceptron()
        assert_same_step(pipe(plain), plain, rows(7))

A file in which all tests do so says ``pytestmark = every_mode``. Of both together, two modes run
without threads.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import inf
from typing import Any

import pytest
from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run.observe.threads_or_inline import Bounds, ThreadsOrInline
from lightning_gpipe.core.schedules import ActivationCheckpointing

# 1 recomputes the first of three micro-batches, "except_last" the first two.
MODES: list[ActivationCheckpointing] = ["always", "except_last", "never", 1]
M = 3  # chunks, unless a test asks for another number; seven rows make 3, 2 and 2
RECOMPUTED: dict[ActivationCheckpointing, int] = {
    "always": M,
    "except_last": M - 1,
    "never": 0,
    1: 1,
}

every_mode = pytest.mark.parametrize("mode", MODES, ids=str)
with_and_without_threads = pytest.mark.parametrize(
    "threads", [True, False], ids=["threads", "no threads"]
)

ALONE = ("except_last", "never")  # the modes that tests of all of them run without threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the other modes without threads."""
    items[:] = [each for each in items if not _left_out(getattr(each, "callspec", None))]


def _left_out(case: Any) -> bool:
    params = {} if case is None else case.params
    modes = params.get("mode") in MODES and params.get("mode") not in ALONE
    return modes and params.get("threads") is False


@pytest.fixture(autouse=True)
def both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``threads="auto"``, the default, begin with threads and try both ways in turns.

    The layers of tests are so small that it would begin with one thread, and soon stay there.
    """
    monkeypatch.setattr(ThreadsOrInline, "bounds", Bounds(heavy=0.0, small=0.0, overhead=inf))


class Pipe:
    """Makes pipelines, and closes them all at the end of the test."""

    def __init__(self, mode: ActivationCheckpointing, threads: bool) -> None:
        self._mode = mode
        self._threads = threads
        self._made: list[GPipe] = []

    def __call__(
        self,
        module: nn.Sequential,
        balance: list[int] | None = None,
        *,
        stages: int | None = None,
        devices: int | Sequence[str] | None = None,
        mode: ActivationCheckpointing | None = None,
        copy: bool = True,
        **options: Any,
    ) -> GPipe:
        """A pipeline of a copy of ``module``.

        Args:
            module: The layers.
            balance: How many layers each stage has; as evenly as can be, the later ones more.
            stages: How many stages there are where no balance is given: two, or one per device.
            devices: The devices, or how many CPUs; a CPU for each stage.
            mode: The ``activation_checkpointing``; the test's ``mode``.
            copy: Whether to leave ``module`` itself alone.
            options: Other arguments of :class:`GPipe`; ``chunks`` is 3.
        """
        if isinstance(devices, int):
            devices = ["cpu"] * devices
        if balance is None:
            balance = even(len(module), stages or max(2, len(devices or [])))
        made = GPipe(
            deepcopy(module) if copy else module,
            balance,
            devices=["cpu"] * len(balance) if devices is None else list(devices),
            activation_checkpointing=self._mode if mode is None else mode,
            **{"chunks": M, "threads": self._threads, **options},
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close what was made."""
        for each in self._made:
            each.close()


def even(layers: int, stages: int) -> list[int]:
    """A balance whose stages differ by one layer at most."""
    size, more = divmod(layers, stages)
    return [size + (j >= stages - more) for j in range(stages)]


@pytest.fixture
def mode() -> ActivationCheckpointing:
    """How much the pipelines of a test recompute."""
    return "except_last"


@pytest.fixture
def threads() -> bool:
    """Whether the pipelines of a test run on threads."""
    return True


@pytest.fixture
def pipe(mode: ActivationCheckpointing, threads: bool) -> Iterator[Pipe]:
    """The factory of the test's pipelines."""
    made = Pipe(mode, threads)
    yield made
    made.close()

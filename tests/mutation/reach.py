"""Which tests reach which effects: a mutant is tried on no others.

All tests run once in a copy in which each effect says that it is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.mutation.mutants import Mutant, instrumented
from tests.mutation.sessions import Sessions
from tests.mutation.trees import Tree

_LIMIT = 600.0  # seconds for a test of the sound code


@dataclass(frozen=True)
class Test:
    """A test that passes on the sound code."""

    id: str
    seconds: float
    simulated: bool

    @property
    def path(self) -> str:
        """The path of its file."""
        return self.id.partition("::")[0]


@dataclass
class Reach:
    """Which tests reach which effects, by the key of the mutant.

    Attributes:
        tests: All that passed.
        failed: The ids of those that did not, which are left out.
    """

    tests: list[Test] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _of: dict[tuple[str, str, str, int], list[Test]] = field(default_factory=dict)

    def add(self, test: Test, reached: Iterable[Mutant]) -> None:
        """Record what a test has reached."""
        self.tests.append(test)
        for mutant in reached:
            self._of.setdefault(mutant.key, []).append(test)

    def of(self, mutant: Mutant) -> list[Test]:
        """The tests that reach a mutant, the likeliest to notice it first."""
        return sorted(self._of.get(mutant.key, ()), key=lambda test: _rank(test, mutant))


def instrument(tree: Tree, mutants: Sequence[Mutant]) -> None:
    """Let the modules of all mutants report what is reached, by its index among ``mutants``."""
    for k, mutant in enumerate(mutants):
        if mutant.index == 0:
            tree.change(mutant.module, instrumented(tree.source(mutant.module), first=k))


def measure(
    sessions: Sessions, path: str, *, simulated: bool, mutants: Sequence[Mutant], reach: Reach
) -> None:
    """Run the tests of a file in an instrumented copy."""
    seconds: dict[str, float] = {}
    for event in sessions.run([path], simulated=simulated, limit=_LIMIT, stop=False):
        test = event["test"]
        match event["event"]:
            case "failed" | "hung":
                reach.failed.append(test)
                seconds.pop(test, None)
            case "passed":
                seconds[test] = event["seconds"]
            case "finished" if test in seconds:
                found = [mutants[k] for k in event["reached"]]
                reach.add(Test(test, seconds[test], simulated), found)


def mirror_of(module: str) -> str:
    """The path of the test file that mirrors a module."""
    path = PurePosixPath(module)
    folder = PurePosixPath("tests", *path.parent.parts[1:])
    return str(folder / f"test_{path.name}")


_FOLDERS: Mapping[str, int] = {"core": 2, "promises": 3, "gpu": 3, "lightning": 4}


def _rank(test: Test, mutant: Mutant) -> tuple[int, float]:
    """The order of tests: the mirroring file, for streams GPUs, the room, promises, the rest."""
    mirror = mirror_of(mutant.module)
    if test.path == mirror or (mutant.on_streams and test.simulated):
        return 0, test.seconds
    if PurePosixPath(test.path).parent == PurePosixPath(mirror).parent:
        return 1, test.seconds
    folder = PurePosixPath(test.path).parts[1]
    return _FOLDERS.get(folder, 5), test.seconds

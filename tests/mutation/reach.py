"""Which tests reach which effects: a mutant is tried on no others.

All tests run once in a copy in which each effect says that it is reached.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import itemgetter
from pathlib import Path, PurePosixPath
from threading import Lock

from tests.mutation.declaration import PROMISES
from tests.mutation.mutants import Mutant, instrumented
from tests.mutation.sessions import Sessions
from tests.mutation.trees import Tree

Key = tuple[str, str, str, int]  # of a mutant

_LIMIT = 600.0  # seconds for a test of the sound code


@dataclass(frozen=True)
class Test:
    """A test that passes on the sound code."""

    __test__ = False  # for pytest: this is none itself

    id: str
    seconds: float
    simulated: bool

    @property
    def path(self) -> str:
        """The path of its file."""
        return self.id.partition("::")[0]

    @property
    def function(self) -> str:
        """The function of which it is one case."""
        return self.id.partition("[")[0]


@dataclass
class Reach:
    """Which tests reach which effects, by the key of the mutant.

    Attributes:
        tests: All that passed.
        failed: The ids of those that did not, which are left out.
    """

    tests: list[Test] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _of: dict[Key, list[int]] = field(default_factory=dict)  # indices of tests
    _lock: Lock = field(default_factory=Lock)

    def add(self, test: Test, reached: Iterable[Mutant]) -> None:
        """Record what a test has reached."""
        with self._lock:
            self.tests.append(test)
            for mutant in reached:
                self._of.setdefault(mutant.key, []).append(len(self.tests) - 1)

    def forget(self, path: str) -> None:
        """Forget the tests of a file, which will run again."""
        gone = {k for k, test in enumerate(self.tests) if test.path == path}
        self.failed = [test for test in self.failed if test.partition("::")[0] != path]
        for tests in self._of.values():
            tests[:] = [k for k in tests if k not in gone]

    def of(self, mutant: Mutant) -> list[Test]:
        """The tests that reach a mutant, the likeliest to notice it first."""
        found = sorted((self.tests[k] for k in self._of.get(mutant.key, ())), key=_seconds)
        before: Counter[str] = Counter()
        ranked = []
        for test in found:
            ranked.append((_rank(test, mutant), before[test.function], test))
            before[test.function] += 1
        return [test for *_, test in sorted(ranked, key=itemgetter(0, 1))]

    def save(self, path: Path) -> None:
        """Write it to a file, from which :meth:`load` reads it."""
        of = [[*key, tests] for key, tests in self._of.items()]
        path.write_text(json.dumps([list(map(astuple, self.tests)), self.failed, of]), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Reach:
        """What :meth:`save` wrote, if the code has not changed since; lines may have moved."""
        tests, failed, of = json.loads(path.read_text("utf-8"))
        return cls([Test(*each) for each in tests], failed, {tuple(k): v for *k, v in of})


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


def promises_of(module: str) -> list[str]:
    """The paths of the test files of the promises that a module is there for."""
    names = PROMISES.get(module.removeprefix("lightning_gpipe/core/"), "")
    return [f"tests/promises/test_{name}.py" for name in names.split()]


_FOLDERS: Mapping[str, int] = {"core": 3, "promises": 4, "gpu": 5, "lightning": 6}


def _rank(test: Test, mutant: Mutant) -> int:
    """The order of tests: for streams GPUs, the mirroring file, the room, its promises, the rest.

    Those on GPUs are kept together, because each change of the kind is another run of pytest. Of
    equal ones the quickest case of each function is first, then the second of each, and so on.
    """
    mirror = mirror_of(mutant.module)
    folder = PurePosixPath(test.path).parts[1]
    if mutant.on_streams and test.simulated:
        return -1
    if test.path == mirror:
        return 0
    if PurePosixPath(test.path).parent == PurePosixPath(mirror).parent:
        return 1
    if test.path in promises_of(mutant.module):
        return 2
    return _FOLDERS.get(folder, 7)


def _seconds(test: Test) -> float:
    return test.seconds

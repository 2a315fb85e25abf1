"""A run of all trials on a module of a few lines, in a tree of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutation.declaration import PROMISES
from tests.mutation.explained import EXPLAINED, Explained
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.reach import Reach, Test, instrument, measure, mirror_of, promises_of
from tests.mutation.records import Records
from tests.mutation.sessions import Sessions
from tests.mutation.table import explanation_of, obsolete, summary, survivors, table
from tests.mutation.trees import Tree
from tests.mutation.trials import Trial, attempt

TOOL = Path(__file__).parent
ROOT = TOOL.parents[1]

GATE = """\
import os
import threading

class Gate:
    def __init__(self):
        self.opened = threading.Event()
        self.log = []

    def open(self):
        self.log.append("opens")
        self.opened.set()
        self.count = 1

    def shut(self):
        self.opened.clear()

    def end(self):
        self.log.clear()
        raise ValueError

    def leave(self):
        os._exit(3)

    def knock(self):
        self.log.append("knocks")
"""

TESTS = """\
import multiprocessing
import subprocess
import sys
import pytest
from gate import Gate

@pytest.fixture(scope="module")
def keeper():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield pool

def knock():
    gate = Gate()
    gate.knock()
    return gate.log

def test_keeper(keeper):
    keeper.apply(knock)

def test_keeper_again(keeper):
    assert keeper.apply(knock) == ["knocks"]

def test_log():
    gate = Gate()
    gate.open()
    assert gate.log == ["opens"]

def test_wait():
    gate = Gate()
    gate.open()
    assert gate.opened.wait()

def test_end():
    with pytest.raises(ValueError):
        Gate().end()

def test_process():
    script = "from gate import Gate; Gate().leave()"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 3

def test_that_fails_anyway():
    Gate().shut()
    assert False
"""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reach, list[Trial]]:
    original = tmp_path_factory.mktemp("original")
    shutil.copytree(TOOL, original / "tests" / "mutation", ignore=lambda *_: ["__pycache__"])
    (original / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    (original / "gate.py").write_text(GATE, encoding="utf-8")
    (original / "tests" / "test_gate.py").write_text(TESTS, encoding="utf-8")
    tree = Tree(original, tmp_path_factory.mktemp("copies") / "copy")
    sessions, mutants, reach = Sessions(tree, ["pytest"]), mutants_of("gate.py", GATE), Reach()
    try:
        instrument(tree, mutants)
        measure(sessions, "tests/test_gate.py", simulated=False, mutants=mutants, reach=reach)
        tree.restore("gate.py")
        tried = [attempt(tree, sessions, each, reach, patience=5) for each in mutants]
        assert (tree.root / "gate.py").read_text(encoding="utf-8") == GATE
    finally:
        sessions.close()
    return reach, tried


def test_each_effect_is_noticed_by_a_test_that_needs_it(trials):
    _, tried = trials
    assert {each.mutant.effect: each.noticed for each in tried} == {
        "self.log.append('opens')": "tests/test_gate.py::test_log",
        "self.opened.set()": "tests/test_gate.py::test_wait",
        "self.count = 1": None,
        "self.opened.clear()": None,
        "self.log.clear()": None,
        "raise ValueError": "tests/test_gate.py::test_end",
        "os._exit(3)": "tests/test_gate.py::test_process",
        "self.log.append('knocks')": "tests/test_gate.py::test_keeper_again",
    }


def test_process_that_lives_through_several_tests_reaches_effects_in_each(trials):
    _, tried = trials
    assert [each.reached_by for each in tried if "knocks" in each.mutant.effect] == [2]


def test_copy_stays_as_it_was_copied_whatever_becomes_of_the_original(tmp_path: Path):
    original = tmp_path / "original"
    original.mkdir()
    (original / "gate.py").write_text(GATE, encoding="utf-8")
    tree = Tree(original, tmp_path / "copy")
    (original / "gate.py").write_text("edited meanwhile", encoding="utf-8")

    tree.change("gate.py", "mutant")
    assert tree.source("gate.py") == GATE
    tree.restore("gate.py")
    assert (tmp_path / "copy" / "gate.py").read_text(encoding="utf-8") == GATE


def test_wait_without_an_end_counts_as_noticed(trials):
    _, tried = trials
    assert [each.mutant.effect for each in tried if each.hung] == ["self.opened.set()"]


def test_only_tests_that_reach_an_effect_are_tried(trials):
    _, tried = trials
    reached = {each.mutant.effect: each.reached_by for each in tried}
    assert reached["self.count = 1"] == 2
    assert reached["raise ValueError"] == 1


def test_tests_that_fail_without_a_change_are_left_out(trials):
    reach, tried = trials
    assert reach.failed == ["tests/test_gate.py::test_that_fails_anyway"]
    assert [each.reached_by for each in tried if "opened.clear" in each.mutant.effect] == [0]


def test_reach_is_kept_for_further_runs(trials, tmp_path: Path):
    reach, tried = trials
    reach.save(tmp_path / "reach.json")
    loaded = Reach.load(tmp_path / "reach.json")
    assert loaded.failed == reach.failed
    assert [loaded.of(each.mutant) for each in tried] == [reach.of(each.mutant) for each in tried]


def test_tests_that_run_again_are_known_once(trials, tmp_path: Path):
    kept, tried = trials
    kept.save(tmp_path / "reach.json")
    reach = Reach.load(tmp_path / "reach.json")
    reach.forget("tests/test_gate.py")
    assert all(reach.of(each.mutant) == [] for each in tried)


def test_each_function_is_tried_by_its_quickest_case_first():
    (mutant, *_) = mutants_of("lightning_gpipe/core/run/gate.py", GATE)
    seconds = {
        "tests/promises/test_b.py::test_many[1]": 0.1,
        "tests/promises/test_b.py::test_many[2]": 0.2,
        "tests/promises/test_b.py::test_slow": 0.9,
        "tests/core/run/test_other.py::test_room": 5.0,
        "tests/core/run/test_gate.py::test_mirror": 9.0,
        "tests/lightning/test_a.py::test_quick": 0.1,
    }
    reach = Reach()
    for test, taken in seconds.items():
        reach.add(Test(test, taken, simulated=False), [mutant])

    names = [test.id.rpartition("::")[2] for test in reach.of(mutant)]
    mirror_and_room, promises = ["test_mirror", "test_room"], ["test_many[1]", "test_slow"]
    assert names == [*mirror_and_room, *promises, "test_many[2]", "test_quick"]


def test_promises_of_each_module_exist():
    for module in PROMISES:
        assert Path("lightning_gpipe", "core", module).exists(), module
        paths = promises_of(f"lightning_gpipe/core/{module}")
        assert paths and all(Path(path).exists() for path in paths)


def test_noticed_effects_are_not_tried_again(tmp_path: Path):
    (tmp_path / "gate.py").write_text(GATE, encoding="utf-8")
    first, second = mutants = mutants_of("gate.py", GATE)[:2]
    kept = tmp_path / "trials"
    noticed = Trial(first, "tests/t", hung=True, reached_by=3, tried=2, seconds=1.0)
    records = Records(kept, tmp_path, mutants)
    records.add(noticed)
    records.add(Trial(second, None, hung=False, reached_by=3, tried=3, seconds=1.0))

    assert Records(kept, tmp_path, mutants).noticed() == [noticed]

    (tmp_path / "gate.py").write_text(f"{GATE}# changed", encoding="utf-8")
    assert Records(kept, tmp_path, mutants).noticed() == []

    records.add(Trial(second, "tests/t", hung=False, reached_by=3, tried=3, seconds=1.0))
    assert Records(kept, tmp_path, mutants).noticed() == [], "tried in the module as it was before"


def trial(effect: str, noticed: str | None) -> Trial:
    mutant = Mutant("lightning_gpipe/core/run/a.py", "Run.end", effect, "waits", 0, 7, 0)
    return Trial(mutant, noticed, hung=False, reached_by=3, tried=3, seconds=1.0)


REASON = Explained("run/a.py", "Run.end", "self.wait(", "Only memory is freed sooner.")


def test_survivor_is_one_that_is_not_explained():
    tried = [trial("self.wait(1)", None), trial("self.put()", None), trial("self.get()", "tests/t")]
    assert [each.mutant.effect for each in survivors(tried, [REASON])] == ["self.put()"]
    assert summary(tried, [REASON]) == (
        "3 effects taken out in turn: 1 noticed, 1 explained, 1 survivors."
    )
    assert "Only memory is freed sooner." in table(tried, [REASON])


def test_explanation_that_is_no_longer_true():
    noticed = [trial("self.wait(1)", "tests/t")]
    assert obsolete(noticed, [REASON]) == ["run/a.py Run.end: self.wait(: noticed by tests/t"]
    other = [trial("self.put()", None)]
    assert obsolete(other, [REASON]) == ["run/a.py Run.end: self.wait(: there is no such effect"]


@pytest.mark.parametrize("entry", EXPLAINED, ids=lambda entry: f"{entry.module} {entry.effect}")
def test_explained_effect_exists(entry: Explained):
    module = f"lightning_gpipe/core/{entry.module}"
    source = (ROOT / module).read_text(encoding="utf-8")
    assert any(explanation_of(each, [entry]) for each in mutants_of(module, source))


def test_file_that_mirrors_a_module():
    assert mirror_of("lightning_gpipe/core/run/worker.py") == "tests/core/run/test_worker.py"

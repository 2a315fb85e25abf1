"""Which effects are found in a module, and what is left without one."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutation.declaration import ROOMS
from tests.mutation.mutants import PROBE, instrumented, mutants_of, without

ROOT = Path(__file__).parents[2]
ENGINE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def effects(source: str) -> list[str]:
    return [f"{each.kind}: {each.effect}" for each in mutants_of("a.py", dedent(source))]


def body_without(source: str, index: int) -> str:
    return without(dedent(source), index)


def test_calls_whose_value_nobody_takes():
    assert effects("""\
        def copy(stream, event, rows):
            '''A docstring is no effect, and neither is what is computed.'''
            stream.wait_event(event)
            rows = sorted(rows)
            found = []
            found.append(rows)
            print(found)
            return stream.record_event()
        """) == ["waits: stream.wait_event(event)", "acts: print(found)"]


def test_values_that_outlive_the_function():
    assert effects("""\
        class Run:
            def __init__(self):
                self.idle = True
            def begin(self, slots):
                self.idle = False
                first, self.last = self.last, None
                self.parcels[0] = 1
                local = self.idle
                del slots["weight"]
                if local:
                    raise RuntimeError
        """) == [
        "sets: self.idle = False",
        "sets: first, self.last = (self.last, None)",
        "sets: self.parcels[0] = 1",
        "undoes: del slots['weight']",
        "checks: raise RuntimeError",
    ]


def test_context_managers():
    source = """\
        def run(context, lock, path):
            with lock, context.entered(), open(path) as file:
                managers = [context.saving(), context.value()]
        """
    assert effects(source) == [
        "holds: with lock",
        "holds: with context.entered()",
        "holds: context.saving()",
    ]
    assert "with context.entered(), open(path) as file:" in body_without(source, 0)
    assert "[context.value()]" in body_without(source, 2)


def test_only_manager_of_a_block():
    source = """\
        def run(lock):
            with lock:
                return 1
        """
    assert body_without(source, 0) == "def run(lock):\n    return 1"


def test_what_is_undone_after_an_error():
    source = """\
        def run(work, generator):
            try:
                work()
            finally:
                generator.rewind()
        """
    assert effects(source) == [
        "undoes: finally: generator.rewind()",
        "acts: work()",
        "rewinds: generator.rewind()",
    ]
    assert body_without(source, 0) == (
        "def run(work, generator):\n    work()\n    generator.rewind()"
    )


def test_equal_effects_are_told_apart():
    first, second = mutants_of("a.py", "def run(a):\n    a.wait()\n    a.wait()\n")
    assert first.key != second.key
    assert (first.line, second.line) == (2, 3)


def test_effect_is_replaced_by_nothing_else():
    source = "def run(a):\n    a.wait()\n    a.put(1)\n"
    assert without(source, 0) == "def run(a):\n    pass\n    a.put(1)"


def test_copy_that_reports_what_is_reached():
    text = instrumented('"""A module."""\nfrom __future__ import annotations\n\n' + RUN, first=7)
    lines = text.splitlines()
    assert lines[2] == f"from tests.mutation.probe import reached as {PROBE}"
    assert lines[lines.index("        a.wait()") - 1] == f"        {PROBE}(7)"


RUN = """\
def run(a):
    if a:
        a.wait()
"""


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.stem)
def test_each_module_of_the_engine_without_an_effect_is_python(path: Path):
    source = path.read_text(encoding="utf-8")
    found = mutants_of(path.name, source)
    compile(instrumented(source, first=0), path.name, "exec")
    if found:
        compile(without(source, found[-1].index), path.name, "exec")
    assert len({each.key for each in found}) == len(found)

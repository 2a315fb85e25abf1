"""No hang: two machines train as one process, and survive a network that fails."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.namespaces import Machines, two_machines
from tests.multihost.runs import PROCESSES, Run, ended
from tests.multihost.training import BATCHES, fit
from tests.support.processes import assert_equal

MODES = list(PROCESSES)
SLOWLY = ("--pause", "0.1")  # so that there is time for something to happen


@pytest.fixture(scope="session")
def _both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as found:
        yield found


@pytest.fixture
def machines(_both: Machines) -> Iterator[Machines]:
    """Two machines, on which nothing runs."""
    yield _both
    _both.reset()


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where a run in one process ends."""
    folder = tmp_path_factory.mktemp("single")
    fit(folder, "single")
    return ended(folder)


@pytest.mark.parametrize("mode", MODES)
def test_training_is_that_of_one_process(
    machines: Machines, tmp_path: Path, mode: str, expected: dict[str, Any]
) -> None:
    run = Run(machines, tmp_path, mode)
    run.start()
    run.succeed()

    assert_equal(run.weights(), expected)


@pytest.mark.parametrize("launched", [True, False], ids=["torchrun", "by hand"])
def test_machines_with_ipv6_only(
    machines: Machines, tmp_path: Path, launched: bool, expected: dict[str, Any]
) -> None:
    machines.address(6)
    run = Run(machines, tmp_path, "per_node")
    run.start() if launched else run.start_without_launcher(machines.both[0].addresses[6])
    run.succeed()

    assert_equal(run.weights(), expected)


def test_name_server_that_does_not_answer(
    machines: Machines, tmp_path: Path, expected: dict[str, Any]
) -> None:
    for machine in machines.both:
        machine.ask("files dns")
    run = Run(machines, tmp_path, "per_node")
    run.start_without_launcher("host0")
    run.succeed()

    assert_equal(run.weights(), expected)


def test_first_machine_whose_name_nobody_knows(machines: Machines, tmp_path: Path) -> None:
    for machine in machines.both:
        machine.ask("files dns")
    run = Run(machines, tmp_path, "per_node", "--bound", "3")
    run.start_without_launcher("first.example")

    assert all(run.end())
    for error in run.errors().values():
        assert "nobody knows that of MASTER_ADDR='first.example'" in error


@pytest.mark.parametrize("mode", MODES)
def test_network_that_fails_for_five_seconds(
    machines: Machines, tmp_path: Path, mode: str, expected: dict[str, Any]
) -> None:
    run = Run(machines, tmp_path, mode, *SLOWLY)
    run.start()
    run.reach(4)
    machines.unplug()
    time.sleep(5.0)
    machines.plug()
    run.succeed()

    assert_equal(run.weights(), expected)


@pytest.mark.parametrize("mode", MODES)
def test_network_that_fails_for_good_and_a_restart(
    machines: Machines, tmp_path: Path, mode: str, expected: dict[str, Any]
) -> None:
    run = Run(machines, tmp_path, mode, *SLOWLY, "--bound", "6")
    run.start()
    run.reach(BATCHES + 2)
    machines.unplug()
    run.fail()
    errors = run.errors()
    machines.plug()  # torchrun itself waits for an answer of its store
    codes = run.end()
    run.start()
    run.succeed()

    assert all(codes)
    each = PROCESSES[mode]
    for rank, error in errors.items():
        # Those on the second machine hear of all others by rank 0.
        others = range(each, 2 * each) if rank < each else [0]
        are = "is" if len(others) == 1 else "are"
        names = " and ".join(rf"rank {k}( \(stages? [0-9, ]+\))?" for k in others)
        assert re.match(f"RankFailed: {names} {are} lost: nothing was heard for 6 s", error)
    assert_equal(run.weights(), expected)


def test_network_that_fails_while_they_start(machines: Machines, tmp_path: Path) -> None:
    run = Run(machines, tmp_path, "per_stage", "--bound", "3")
    run.start()
    run.begin()
    machines.unplug()
    run.fail()
    machines.plug()

    assert all(run.end())
    for error in run.errors().values():
        assert error.startswith(("RuntimeError: all processes ", "RankFailed: rank "))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machine", [0, 1])
def test_process_that_is_killed_and_an_elastic_restart(
    machines: Machines, tmp_path: Path, mode: str, machine: int, expected: dict[str, Any]
) -> None:
    rank = (machine + 1) * PROCESSES[mode] - 1
    run = Run(machines, tmp_path, mode, *SLOWLY)
    run.start("--max-restarts", "1")
    run.reach(BATCHES + 2)
    os.kill(run.process(rank), signal.SIGKILL)
    run.succeed()

    assert f"RankFailed: rank {rank}" in " ".join(run.errors().values())
    assert_equal(run.weights(), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machine", [0, 1])
def test_sigterm_on_one_machine_stops_both_and_a_restart_goes_on(
    machines: Machines, tmp_path: Path, mode: str, machine: int, expected: dict[str, Any]
) -> None:
    """Once the processes that got the signal waited for the others, and these for them."""
    each = PROCESSES[mode]
    run = Run(machines, tmp_path, mode, *SLOWLY)
    run.start()
    run.reach(BATCHES + 2)
    for rank in range(machine * each, (machine + 1) * each):
        os.kill(run.process(rank), signal.SIGTERM)
    run.fail()
    errors = run.errors()
    stopped = {run.steps(rank) for rank in range(2 * each)}
    run.end()
    run.start()
    run.succeed()

    assert set(errors) == set(range(2 * each))
    assert all(error.startswith("SIGTERMException") for error in errors.values())
    assert len(stopped) == 1
    assert_equal(run.weights(), expected)

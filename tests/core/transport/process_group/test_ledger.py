"""Failures by their exchange: who is behind ends those before, and all count alike."""

import pytest

from lightning_gpipe.core.transport import RankFailed
from lightning_gpipe.core.transport.process_group.ledger import Failure, Ledger

BURNT = Failure((1,), "failed: burnt")


def begun(times: int) -> Ledger:
    ledger = Ledger()
    ledger.begun = times
    return ledger


def test_failure_in_the_present_exchange() -> None:
    one, two = begun(3), begun(3)
    serial, known = one.fail(running=True)
    two.record_failure(serial, BURNT)

    assert not known
    assert two.failure == BURNT
    assert two.fail(running=True) == (serial, True)
    assert one.state == two.state == (1, 0, 0)
    assert two.failure is None


def test_one_that_is_behind_ends_what_came_before() -> None:
    ahead, behind = begun(4), begun(2)
    serial, _ = ahead.fail(running=True)
    behind.record_failure(serial, BURNT)

    assert behind.failure is None
    behind.begun = 4
    assert behind.failure == BURNT


def test_failure_between_two_exchanges_is_of_the_next() -> None:
    one, two = begun(2), begun(2)
    serial, _ = one.fail(running=False)
    two.record_failure(serial, BURNT)

    assert two.failure is None
    two.begun += 1
    assert two.failure == BURNT


def test_second_failure_of_the_same_run_is_no_other() -> None:
    one, two = begun(3), begun(3)
    first, _ = one.fail(running=True)
    second, _ = two.fail(running=True)
    one.record_failure(second, BURNT)
    two.record_failure(first, BURNT)
    one.begun = two.begun = 1

    assert one.failure is two.failure is None


def test_first_of_several_failures_counts() -> None:
    ledger, later = begun(2), Failure((2,), "failed: later")
    ledger.record_failure(begun(3).fail(running=True)[0], later)
    ledger.record_failure(begun(2).fail(running=True)[0], BURNT)

    assert ledger.failure == BURNT


def test_closed_by_another_until_it_closes_too() -> None:
    ledger = begun(2)
    ledger.record_close(1, 1, begun(1).serial)

    assert ledger.failure == Failure((1,), "closed the pipeline")
    assert ledger.failure_at_end is None
    assert ledger.close()
    assert ledger.failure is None


def test_closed_after_its_part_in_an_exchange_that_another_begins_later() -> None:
    ledger = Ledger()
    ledger.record_close(1, 1, begun(1).serial)

    ledger.begun += 1
    assert ledger.failure is None
    ledger.begun += 1
    assert ledger.failure == Failure((1,), "closed the pipeline")


def test_one_that_fails_and_closes_has_failed() -> None:
    ledger = Ledger()
    ledger.record_failure((0 << 32) + 1, BURNT)
    ledger.record_close(1, 1, ledger.serial)

    ledger.begun += 1

    assert ledger.failure == BURNT


def test_who_is_lost_first_stays() -> None:
    ledger = begun(1)

    assert ledger.lose([1], Failure((1,), "is lost"))
    assert not ledger.lose([2], Failure((2,), "is lost"))
    assert ledger.failure == Failure((1,), "is lost")
    assert ledger.lost_ranks == {1, 2}


def test_end_after_a_failure_does_not_hide_it() -> None:
    """Once one that began the exchange later found that another had ended, but not why."""
    ledger, failing = begun(2), begun(3)
    serial, _ = failing.fail(running=True)
    ledger.record_failure(serial, BURNT)
    ledger.record_end(1, 1, failing.serial)

    end = ledger.end_of(1)
    assert end is not None
    assert ledger.lose([1], Failure.ended([1]), end)

    assert ledger.failure is None  # all that this exchange needs has come
    ledger.begun += 1
    assert ledger.failure == BURNT
    ledger.fail(running=True)
    ledger.begun += 1
    assert ledger.failure == Failure((1,), "has ended")
    assert ledger.lose([2], Failure((2,), "is lost"))
    assert not ledger.lose([1], Failure((1,), "is lost"))
    assert ledger.failure == Failure((2,), "is lost")


def test_end_that_follows_that_of_this_process() -> None:
    ledger = Ledger()
    ledger.end()

    assert ledger.record_end(1, 1, 5)
    assert ledger.ended is None


def test_end_of_a_process_while_this_one_goes_on() -> None:
    ledger = Ledger()

    assert not ledger.record_end(1, 1, 5)
    assert ledger.ended == Failure((1,), "has ended")
    assert not ledger.record_end(2, 1, 5)
    assert ledger.ended == Failure((1, 2), "have ended")
    ledger.end()
    assert ledger.ended is None


@pytest.mark.parametrize(
    "failure, ended",
    [(Failure.ended([1]), True), (Failure.ended([1, 2]), True), (Failure((1,), "is lost"), False)],
    ids=["one has ended", "two have ended", "one is lost"],
)
def test_error_tells_an_end_from_a_failure(failure: Failure, ended: bool) -> None:
    error = Failure.decode(failure.encode()).error([0, 1, 2])

    assert isinstance(error, RankFailed)
    assert error.ended == ended

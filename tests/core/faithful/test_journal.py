import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_gpipe.core.faithful.journal import (
    _JOURNALS,
    Attributes,
    Journal,
    JournalAbandoned,
    _abandon_all,
    patched,
)
from tests.support.interrupts import first_and_last, interrupted_at
from tests.support.waiting import PATIENCE


def test_changes_last_as_long_as_the_block() -> None:
    journal, slots = Journal(), {"a": 1}

    with journal.changed([(slots, "a", 2), (slots, "b", 3)]):
        inside = dict(slots)

    assert inside == {"a": 2, "b": 3}
    assert slots == {"a": 1}
    assert not len(journal)


def test_changes_end_after_an_error() -> None:
    journal, slots = Journal(), {"a": 1}

    with pytest.raises(KeyError), journal.changed([(slots, "a", 2)]):
        raise KeyError

    assert slots == {"a": 1}


def test_inner_changes_end_before_outer_ones() -> None:
    journal, slots = Journal(), {"a": 1}

    with journal.changed([(slots, "a", 2)]):
        with journal.changed([(slots, "a", 3)]):
            pass
        assert slots == {"a": 2}

    assert slots == {"a": 1}


def test_block_ends_what_was_changed_within_it() -> None:
    journal, slots = Journal(), {"a": 1}

    with journal.changed(()):
        journal.write([(slots, "a", 2)])

    assert slots == {"a": 1}


def test_attribute_is_set_as_by_assignment() -> None:
    journal, module = Journal(), nn.Dropout(0.5)

    attributes = Attributes(module)
    with journal.changed([(attributes, "p", 0.0), (attributes, "training", False)]):
        assert (module.p, module.training) == (0.0, False)

    assert (module.p, module.training) == (0.5, True)


def test_value_that_the_block_took_away_comes_back() -> None:
    journal, slots = Journal(), {"a": 1}

    with journal.changed([(slots, "a", 2), (slots, "b", 3)]):
        slots.clear()

    assert slots == {"a": 1}


class Stubborn(dict[str, int]):
    """Slots whose next write is interrupted before it is made."""

    struck = False

    def __setitem__(self, name: str, value: int) -> None:
        if self.struck:
            self.struck = False
            raise KeyboardInterrupt
        super().__setitem__(name, value)


def test_interrupted_write_can_be_undone() -> None:
    journal, slots, stubborn = Journal(), {"a": 1}, Stubborn(b=1)
    stubborn.struck = True

    with pytest.raises(KeyboardInterrupt):
        journal.write([(slots, "a", 2), (stubborn, "b", 2)])
    journal.undo()

    assert (slots, stubborn) == ({"a": 1}, {"b": 1})


def test_interrupted_undo_is_continued_by_the_next() -> None:
    journal, slots, stubborn = Journal(), {"a": 1}, Stubborn(b=1)
    journal.write([(slots, "a", 2), (stubborn, "b", 2)])
    stubborn.struck = True

    with pytest.raises(KeyboardInterrupt):
        journal.undo()
    journal.undo()

    assert (slots, stubborn) == ({"a": 1}, {"b": 1})


def test_parameter_comes_back_as_the_same_object() -> None:
    journal, layer = Journal(), nn.Linear(2, 2)
    weight = layer.weight

    with journal.changed([(layer._parameters, "weight", nn.Parameter(torch.zeros(2, 2)))]):
        assert layer.weight is not weight

    assert layer.weight is weight


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda j: pickle.loads(pickle.dumps(j))])
def test_copy_has_changed_nothing(copied) -> None:
    journal, slots = Journal(), {"a": 1}
    journal.write([(slots, "a", 2)])

    assert not len(copied(journal))


# A run that has failed while a worker is busy.


def test_abandoned_changes_are_undone_and_no_more_are_made() -> None:
    journal, slots = Journal(), {"a": 1, "b": 1}
    with journal.changed([(slots, "a", 2)]):
        journal.abandon()
        assert slots == {"a": 1, "b": 1}
        with pytest.raises(JournalAbandoned):
            journal.write([(slots, "b", 2)])
        slots["a"] = 3  # what the user does then

    assert slots == {"a": 3, "b": 1}


def test_slot_that_another_has_changed_is_left_to_be_undone_later() -> None:
    """A pipeline in a layer would put back the outer one's shadows, and they would stay."""
    journal, inner, slots = Journal(), Journal(), {"a": 1, "b": 1}
    with journal.changed([(slots, "a", 2), (slots, "b", 2)]):
        with inner.changed([(slots, "a", 3)]):
            journal.abandon()
            assert slots == {"a": 3, "b": 1}
        assert slots == {"a": 2, "b": 1}

    assert slots == {"a": 1, "b": 1}


def test_journal_that_was_reset_can_be_used_again() -> None:
    journal, slots = Journal(), {"a": 1}
    journal.abandon()
    journal.reset()

    with journal.changed([(slots, "a", 2)]):
        assert slots == {"a": 2}

    assert slots == {"a": 1}


def test_changes_that_an_interrupt_left_are_undone_on_reset() -> None:
    journal, slots = Journal(), {"a": 1}
    journal.write([(slots, "a", 2)])

    journal.reset()

    assert slots == {"a": 1}


def test_lock_that_an_interrupt_left_is_open_after_reset() -> None:
    """Ctrl-C just before a ``with`` block exits leaves it to a thread that will not open it."""
    journal, slots, written = Journal(), {"a": 1}, threading.Event()
    journal._lock.acquire()

    journal.reset()

    def write() -> None:
        journal.write([(slots, "a", 2)])
        written.set()

    threading.Thread(target=write, daemon=True).start()
    assert written.wait(PATIENCE)


def test_lock_of_a_thread_that_a_fork_left_behind() -> None:
    """As in a child that was forked while another thread of its parent made a change."""
    journal, slots, held, leave = Journal(), {"a": 1}, threading.Event(), threading.Event()
    journal.write([(slots, "a", 2)])

    def hold() -> None:
        with journal._lock:
            held.set()
            leave.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    child = threading.Thread(target=_abandon_all, daemon=True)
    holder.start()
    assert held.wait(PATIENCE)
    child.start()
    child.join(PATIENCE / 2)
    ended = not child.is_alive()
    leave.set()
    holder.join(PATIENCE)

    assert ended
    assert slots == {"a": 1}


class Slow(dict[str, int]):
    """Slots in whose next write a thread stays until it may go on."""

    def __init__(self, **values: int) -> None:
        super().__init__(**values)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __setitem__(self, name: str, value: int) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
        super().__setitem__(name, value)


def abandoned_during(journal: Journal, change: Callable[[], object], slow: Slow) -> list[str]:
    """Abandon the journal while another thread is in a change; returns what that raised."""
    errors: list[str] = []

    def run() -> None:
        try:
            change()
        except BaseException as error:
            errors.append(repr(error))

    worker, caller = threading.Thread(target=run), threading.Thread(target=journal.abandon)
    worker.start()
    assert slow.begun.wait(PATIENCE)
    caller.start()
    caller.join(0.1)  # as it must wait for the worker, it is not over by then
    slow.go_on.set()
    worker.join(PATIENCE)
    caller.join(PATIENCE)
    return errors


def test_journal_is_abandoned_while_a_thread_makes_a_change() -> None:
    """Else the change would be made after it was undone, and stay."""
    journal, slots = Journal(), Slow(a=1)

    errors = abandoned_during(journal, lambda: journal.write([(slots, "a", 2)]), slots)

    assert errors == []
    assert slots == {"a": 1}


def test_journal_is_abandoned_while_a_thread_undoes_a_change() -> None:
    journal, slots, slow = Journal(), {"a": 1}, Slow(a=1)
    slow.begun.set()
    journal.write([(slots, "a", 2), (slow, "a", 2)])
    slow.begun.clear()

    errors = abandoned_during(journal, journal.undo, slow)

    assert errors == []
    assert (slots, slow, len(journal)) == ({"a": 1}, {"a": 1}, 0)


def test_end_of_a_journal_runs_no_code_in_which_python_would_drop_an_interrupt() -> None:
    journals = [Journal()]
    called: list[tuple[str, str]] = []

    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    journals.clear()
    sys.setprofile(None)

    assert [call for call in called if call[0] == "call"] == []


def test_journals_that_ended_are_not_remembered() -> None:
    gc.collect()
    journal = Journal()
    before = len(_JOURNALS)

    for _ in range(100):
        journal = Journal()

    assert len(_JOURNALS) <= before + 1
    assert journal in [reference() for reference in _JOURNALS.values()]


def test_interrupts_of_patches() -> None:
    """Ctrl-C at any line, the first and the last time that it runs, leaves no change."""
    slots = {"old": 1}

    def run() -> None:
        with patched([(slots, "old", 2), (slots, "new", 3)]):
            assert slots == {"old": 2, "new": 3}

    files = {Journal.write.__code__.co_filename, __file__}
    moments = first_and_last(run, files)
    assert len(moments) > 20
    for line, time in moments:
        interrupted_at(run, line, time)
        assert slots == {"old": 1}, f"after {line}, time {time}"

"""Several context managers as one, at no cost where there are none.

Much may have to hold around an action, and mostly none of it needs doing. To enter a manager that
does nothing takes as long as a small layer, so those are left out of the list to begin with.

# Note [Context managers are classes]
Ctrl-C can strike between the end of a ``with`` block and the call that leaves it. What a generator
has entered is then left whenever the generator is garbage, in the middle of something else: grad
mode would go back to what it was in a backward long over. An object that is abandoned does nothing.
So what holds state of a thread or of the layers is a class with ``__enter__`` and ``__exit__``, and
what is left behind is undone by the next mini-batch, from the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

Manager = AbstractContextManager[Any]

NOTHING: Manager = nullcontext()


def together(managers: Sequence[Manager]) -> Manager:
    """One that enters all of ``managers``, the first one first."""
    if not managers:
        return NOTHING
    return managers[0] if len(managers) == 1 else Lazily(lambda: managers)


class Lazily:
    """Enters the managers that a function returns when it is entered itself."""

    # A class: see Note [Context managers are classes].

    def __init__(self, managers: Callable[[], Iterable[Manager]]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for manager in self._managers():
                stack.enter_context(manager)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

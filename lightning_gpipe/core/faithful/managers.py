"""Several context managers as one, at no cost where there are none.

Much may have to hold around an action, and mostly none of it needs doing. To enter a manager that
does nothing takes as long as a small layer, so those are left out of the list to begin with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

Manager = AbstractContextManager[Any]

NOTHING: Manager = nullcontext()


def together(managers: Sequence[Manager]) -> Manager:
    """One that enters all of ``managers``, the first one first."""
    if not managers:
        return NOTHING
    return managers[0] if len(managers) == 1 else _all(managers)


@contextmanager
def _all(managers: Sequence[Manager]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield

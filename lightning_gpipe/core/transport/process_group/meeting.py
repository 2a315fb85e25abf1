"""Processes come to the same place, or it is known who does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import Store

_POLL = 0.05  # seconds
_MISSING = "missing "


def meet(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta,
    purpose: str,
    offered: str = "",
    check: Callable[[], None] = lambda: None,
) -> str:
    """Wait for all processes, and agree on a name: one that all offer, or one that is new.

    The first one writes a new name, and waits until all have come to it; it answers each. What an
    earlier run has left in the store, such as one that torchrun has ended, is under other names. A
    collective would wait for as long as the user's process group does, and not tell for whom.

    Args:
        store: What all of them read and write.
        ranks: The global ranks of the processes.
        rank: Which of them this is.
        timeout: How long to wait for the others.
        purpose: What they come for, for the message.
        offered: What this one has, if anything.
        check: Raises if there is no use in waiting any more.

    Raises:
        RuntimeError: If not all have come by then.
    """
    place, own = "-".join(map(str, ranks)), uuid4().hex
    if rank == 0:
        store.set(place, own)
        answer = _gather(store, own, len(ranks), timeout, offered, check)
    else:
        answer = _come(store, place, rank, 2 * timeout, f"{own} {offered}", check)
    if answer.startswith(_MISSING):
        raise RuntimeError(
            f"all processes must {purpose}: rank {answer.removeprefix(_MISSING)} did not within "
            f"{timeout.total_seconds():g} s. See whether it has failed; if it is slow, set a "
            "longer lost_after: this is ten times as long."
        )
    return answer


def _gather(
    store: Store,
    name: str,
    size: int,
    timeout: timedelta,
    offered: str,
    check: Callable[[], None],
) -> str:
    """Wait for the others at this name; returns what they are answered."""
    missing, deadline = list(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing := [k for k in missing if not store.check([f"{name}/{k}"])]:
        if time.monotonic() > deadline:
            break
        check()
        time.sleep(_POLL)
    came = set(range(1, size)).difference(missing)
    told = [store.get(f"{name}/{k}").decode().split(" ") for k in came]
    agreed = offered if all(other == offered for _, other in told) else ""
    answer = _MISSING + ", ".join(map(str, missing)) if missing else agreed or name
    for ticket, _ in told:
        store.set(f"{name}/{ticket}", answer)
    return answer


def _come(
    store: Store,
    place: str,
    rank: int,
    timeout: timedelta,
    told: str,
    check: Callable[[], None],
) -> str:
    """Come to the first process, which may come last and wait for as long itself; its answer."""
    ticket = told.partition(" ")[0]
    name, deadline = "", time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        found = store.get(place).decode() if store.check([place]) else name
        # The first process answers before it goes on to its next meeting, under another name.
        if name and store.check([f"{name}/{ticket}"]):
            return store.get(f"{name}/{ticket}").decode()
        if found != name:
            name = found
            store.set(f"{name}/{rank}", told)
        check()
        time.sleep(_POLL)
    return _MISSING + "0"

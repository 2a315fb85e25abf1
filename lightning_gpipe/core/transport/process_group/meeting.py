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
    offered: str = "",
    check: Callable[[], None] = lambda: None,
) -> str:
    """Wait for all processes, and agree on a name: one that all offer, or one that is new.

    Each writes that it has come; the first one waits for all, and answers each. A collective would
    wait for as long as the user's process group does, and not tell for whom.

    Args:
        store: What all of them read and write.
        ranks: The global ranks of the processes.
        rank: Which of them this is.
        timeout: How long to wait for the others.
        offered: What this one has, if anything.
        check: Raises if there is no use in waiting any more.

    Raises:
        RuntimeError: If not all have come by then.
    """
    place, own = "-".join(map(str, ranks)), uuid4().hex
    others = [k for k in range(len(ranks)) if k != 0]
    if rank == 0:
        missing = _await(store, {k: f"{place}/{k}" for k in others}, timeout, check)
        came = [k for k in others if k not in missing]
        told = {k: store.get(f"{place}/{k}").decode().split(" ") for k in came}
        agreed = offered if all(other == offered for _, other in told.values()) else ""
        answer = _MISSING + ", ".join(map(str, missing)) if missing else agreed or own
        for k, (ticket, _) in told.items():
            store.delete_key(f"{place}/{k}")
            store.set(f"{place}/{ticket}", answer)
    else:
        store.set(f"{place}/{rank}", f"{own} {offered}")
        # The first may have come last, and then waits for as long itself.
        missing = _await(store, {0: f"{place}/{own}"}, 2 * timeout, check)
        answer = _MISSING + "0" if missing else store.get(f"{place}/{own}").decode()
    if answer.startswith(_MISSING):
        raise RuntimeError(
            "all processes must come to make the pipeline, each with the same owners: rank "
            f"{answer.removeprefix(_MISSING)} did not within {timeout.total_seconds():g} s. See "
            "whether it has failed; if it is slow, set a longer timeout."
        )
    return answer


def _await(
    store: Store, key_of: dict[int, str], timeout: timedelta, check: Callable[[], None]
) -> list[int]:
    """Wait until these keys are there; returns those of whom they are not."""
    missing, deadline = list(key_of), time.monotonic() + timeout.total_seconds()
    while missing := [k for k in missing if not store.check([key_of[k]])]:
        if time.monotonic() > deadline:
            break
        check()
        time.sleep(_POLL)
    return missing

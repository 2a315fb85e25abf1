"""Entries of a store that only processes of the same job can write.

Anyone who reaches a torch.distributed store can read and write all of it. So entries by which
processes find one another are signed with the launcher's secret, and others are ignored.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets

from torch.distributed.distributed_c10d import Store

TOKEN = "LIGHTNING_GPIPE_TOKEN"  # the environment variable


class SignedStore:
    """A store whose entries are signed; see this module."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._refused: set[str] = set()  # the keys of strangers' entries, each logged once

    def set(self, key: str, text: str) -> None:
        self._store.set(key, f"{signature(key, text)} {text}")

    def get(self, key: str) -> str | None:
        """Return the text at ``key``, or None if no process of this job has written any."""
        if not self._store.check([key]):
            return None
        signed, _, text = self._store.get(key).decode(errors="replace").partition(" ")
        if hmac.compare_digest(signed.encode(), signature(key, text).encode()):
            return text
        if key not in self._refused:
            self._refused.add(key)
            logging.getLogger(__name__).warning(
                "Entries in the store must be signed with the token of this job: one at %r is not, "
                "and is ignored. If it is of a process of this job, set the same %s for all of "
                "them.",
                key,
                TOKEN,
            )
        return None


def signature(key: str, text: str = "") -> str:
    """Return the signature of a text, which needs the token."""
    token = os.environ.get(TOKEN, "").encode()
    return hmac.new(token, f"{key}\n{text}".encode(), "sha256").hexdigest()


def make_token() -> None:
    """Make a token for the processes that this one starts, unless there is one."""
    os.environ.setdefault(TOKEN, secrets.token_hex())

"""Trust: a stranger who reaches the store takes nobody's place, and ends nothing."""

import logging
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from lightning_gpipe.core.transport import make_token, signature, store_barrier
from lightning_gpipe.core.transport.process_group.connecting.signed_store import TOKEN, SignedStore
from tests.support.waiting import PATIENCE, awaited

LONG = timedelta(seconds=PATIENCE)
PLACE = "0-1/0/name"
GARBAGE = [b"", b"\xff\x00 \xff", b"a" * 64 + b" missing 1", b"x " * 999, "ß é".encode()]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")


def test_entry_of_this_job() -> None:
    store = SignedStore(HashStore())
    assert store.get("key") is None

    store.set("key", "a text of some words")

    assert store.get("key") == "a text of some words"


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_logged_once(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    inner: Any = HashStore()  # of which the stubs know texts only
    inner.set("key", garbage)
    store = SignedStore(inner)

    assert [store.get("key") for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "one at 'key' is not, and is ignored" in caplog.text


def test_signature_is_of_the_token_the_key_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: Any = HashStore()  # of which the stubs know texts only
    SignedStore(inner).set("key", "text")
    inner.set("other", inner.get("key"))
    inner.set("changed", inner.get("key") + b"s")

    assert SignedStore(inner).get("other") is None
    assert SignedStore(inner).get("changed") is None
    for token in ("another", ""):
        monkeypatch.setenv(TOKEN, token)
        assert SignedStore(inner).get("key") is None


def test_token_is_kept_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signature("key")
    make_token()
    assert signature("key") == before

    tokens = set()
    for _ in range(2):
        monkeypatch.delenv(TOKEN)
        make_token()
        tokens.add(signature("key"))
    assert len({before, *tokens}) == 3


def stranger(store: Any, stop: Event) -> None:
    """Writes wherever processes meet, as one does that has read the code."""
    while not stop.wait(0.02):
        name = store.get(PLACE).decode().split(" ")[-1] if store.check([PLACE]) else "x"
        for key in (PLACE, f"0-1/{name}/1"):
            store.set(key, b"0" * 64 + b" " + name.encode())


def meet(found: list[str], store: HashStore, rank: int) -> None:
    found.append(store_barrier(store, range(2), rank, LONG, "come"))


def started(run: Callable[..., object], *args: object) -> Thread:
    thread = Thread(target=run, args=args)
    thread.start()
    return thread


def test_stranger_that_writes_all_the_time_while_processes_meet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, stop, found = HashStore(), Event(), list[str]()
    other = started(stranger, store, stop)
    try:
        threads = [started(meet, found, store, k) for k in range(2)]
        assert awaited(lambda: len(found), 2, PATIENCE) == 2
    finally:
        stop.set()
        for thread in (other, *threads):
            thread.join()

    assert len(set(found)) == 1
    assert "is ignored" in caplog.text


def test_processes_with_different_tokens_say_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    monkeypatch.setenv(TOKEN, "another")
    with pytest.raises(RuntimeError, match="rank 0 did not"):
        store_barrier(store, range(2), 1, timedelta(seconds=0.1), "come")
    SignedStore(PrefixStore("0-1", store)).set("0/name", "text")
    monkeypatch.setenv(TOKEN, "secret")
    with pytest.raises(RuntimeError, match="rank 0 did not"):
        store_barrier(store, range(2), 1, timedelta(seconds=0.1), "come")

    assert f"set the same {TOKEN} for all of them" in caplog.text

"""Processes that do not start, or start with something else than the others, are named in time.

Here are also the tests of ``comparison``.
"""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import nn
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from lightning_gpipe import __version__
from lightning_gpipe.core.transport import wait_for_server
from lightning_gpipe.distributed.comparison import check_same, versions
from lightning_gpipe.distributed.group import Group
from lightning_gpipe.distributed.rendezvous import start_together, store_of_all
from tests.support.lightning_modules import Classifier, Data, six_layers
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

SOON = timedelta(seconds=1)


class Expected(LightningEnvironment):
    """Two processes on a port that nobody uses, of which this is one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def world_size(self) -> int:
        return 2


@pytest.fixture
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # as it was, after the test
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_own_environment")
def test_process_that_never_starts() -> None:
    with pytest.raises(RuntimeError, match="all processes must start: rank 1 did not within 1 s"):
        start_together(Expected(0), "gloo", SOON, SOON)

    assert not dist.is_initialized()


@pytest.mark.usefixtures("_own_environment")
def test_first_process_that_never_starts() -> None:
    with pytest.raises(
        RuntimeError, match="must start: rank 1 (did not reach|got no answer from) rank 0"
    ):
        start_together(Expected(1), "gloo", SOON, SOON)

    assert not dist.is_initialized()


@pytest.mark.usefixtures("_own_environment")
def test_processes_find_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Expected(0)
    monkeypatch.setenv("MASTER_PORT", str(first.main_port))
    stores: list[Store] = []
    other = Thread(target=lambda: stores.append(store_of_all(Expected(1), 60 * SOON)))
    other.start()

    stores.append(store_of_all(first, 60 * SOON))
    other.join()

    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which another program listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield f"127.0.0.1:{port}"


@pytest.mark.usefixtures("_own_environment")
def test_port_that_is_taken(taken: str) -> None:
    """Once the first process ended with "rank 0 did not reach rank 0"."""
    with pytest.raises(RuntimeError, match=f"rank 0 must listen at {taken}.*set MASTER_PORT"):
        start_together(Expected(0), "gloo", 60 * SOON, SOON)


@pytest.mark.usefixtures("_own_environment")
def test_port_at_which_another_program_answers_nothing(taken: str) -> None:
    """Once PyTorch's store waited for an answer without an end, and we 30 times ``lost_after``."""
    with pytest.raises(RuntimeError, match=f"rank 1 did not reach rank 0 at {taken}, .* another"):
        start_together(Expected(1), "gloo", 10 * SOON, SOON)


@pytest.mark.usefixtures("_own_environment")
def test_store_listens_at_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Expected(0)
    monkeypatch.setenv("MASTER_PORT", str(first.main_port))
    monkeypatch.setattr(Expected, "world_size", lambda self: 1)
    store = store_of_all(first, 60 * SOON)

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", first.main_port), 60).close()
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.usefixtures("_own_environment")
def test_store_that_is_made_again_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Expected(0)
    monkeypatch.setenv("MASTER_PORT", str(first.main_port))
    monkeypatch.setattr(Expected, "world_size", lambda self: 1)
    stores = [store_of_all(first, 60 * SOON) for _ in range(2)]

    stores[0].set("key", "first")
    assert not stores[1].check(["key"])


@pytest.mark.usefixtures("_own_environment")
def test_strangers_at_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Expected(0)
    monkeypatch.setenv("MASTER_PORT", str(first.main_port))
    stores: list[Store] = []
    found = [Thread(target=lambda: stores.append(store_of_all(first, 60 * SOON)))]
    found[0].start()
    wait_for_server("127.0.0.1", first.main_port, 60 * SOON)
    strangers = [socket.create_connection(("127.0.0.1", first.main_port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 99)
    strangers[1].sendall(os.urandom(9999))
    found.append(Thread(target=lambda: stores.append(store_of_all(Expected(1), 60 * SOON))))
    found[1].start()
    for thread in found:
        thread.join()
    for stranger in strangers:
        stranger.close()

    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


OPTIONS: dict[str, Any] = {
    "chunks": 4,
    "split_backward": True,
    "activation_checkpointing": "always",
    "verify": False,
    "timeout": timedelta(seconds=77),
    "save_distributed_checkpoint": True,
}


def different(root: Path, what: str) -> str:
    """What a fit says in which the second process differs."""
    other = dist.get_rank() == 1
    layers, balance, strategy = six_layers(), [2, 4], {}
    if other and what == "model":
        layers[4] = nn.Identity()
    elif other and what == "balance":
        balance = [3, 3]
    elif other and what in OPTIONS:
        strategy = {what: OPTIONS[what]}
    made = trainer_over(root, "per_stage", balance, strategy)
    with pytest.raises(RuntimeError) as error:
        made.fit(Classifier(layers=layers), datamodule=Data())
    return str(error.value)


@pytest.mark.parametrize(
    "what, text",
    [
        ("model", "the class of layers.4 is 'Identity' on rank 1 and 'Linear' on rank 0"),
        ("balance", "the balance is [3, 3] on rank 1 and [2, 4] on rank 0"),
        *((name, f"the {name} is {value!r} on rank 1 and ") for name, value in OPTIONS.items()),
    ],
)
def test_process_that_differs(two_ranks: Pool, tmp_path: Path, what: str, text: str) -> None:
    for message in two_ranks.run(different, tmp_path, what):
        assert message.startswith("all processes must run the same script")
        assert text in message


def with_versions() -> str:
    """What processes of different versions are told; objects without a text are not compared."""
    group = Group(timedelta(seconds=20))
    check_same(group, {"an object": [object() for _ in range(5 * group.rank + 1)][-1]})
    with pytest.raises(RuntimeError) as error:
        check_same(group, {"version of torch": f"2.{group.rank}"})
    return str(error.value)


def test_processes_of_different_versions(two_ranks: Pool) -> None:
    for message in two_ranks.run(with_versions):
        assert "the version of torch is '2.1' on rank 1 and '2.0' on rank 0" in message


def test_versions_of_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once processes that found the package on PYTHONPATH ended with PackageNotFoundError."""

    def not_installed(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", not_installed)

    assert versions()["version of lightning-gpipe"] == __version__


class Dying(Classifier):
    """Ends the process of rank 1 when it is set up."""

    def configure_model(self) -> None:
        if dist.get_rank() == 1:
            os._exit(3)


def start_with_one_that_dies(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {})
    with pytest.raises(RuntimeError) as error:
        made.fit(Dying(), datamodule=Data())
    return str(error.value)


def test_process_that_dies_while_it_starts(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        message, _ = ranks.outcomes(start_with_one_that_dies, tmp_path)

    assert message.startswith("rank 1 is lost: ")

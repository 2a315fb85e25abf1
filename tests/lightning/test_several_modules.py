"""Unchanged model: several modules become pipelines over the same devices and threads.

Here are also the tests of ``pipelined``.
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from tests.lightning.test_replicas import Halves
from tests.support.lightning_modules import (
    CLASSES,
    FEATURES,
    WIDTH,
    assert_same_weights,
    fitted,
    trainer,
    weights,
)
from tests.support.processes import said
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over
from tests.support.two_stacks import Stacks, Translator


def strategy(balance: Any = None, **options: Any) -> GPipeStrategy:
    return GPipeStrategy(
        balance or [[1, 2], [2, 2]],
        module=["layers.encoder", "layers.decoder"],
        **{"chunks": 3, **options},
    )


@pytest.mark.parametrize(
    "balance", [None, [["layers.encoder.1"], ["2"]], "parameters", [[1, 2], "parameters"]], ids=str
)
def test_two_stacks_train_as_on_one_device(tmp_path: Path, balance: Any) -> None:
    plain = fitted(tmp_path, build=Translator)

    piped = fitted(tmp_path, strategy(balance), build=Translator, devices=2)

    assert_same_weights(piped, plain)
    for module in piped.lightning_module.modules():
        assert not {"forward", "_call_impl"} & set(vars(module))


class CountsThreads(Translator):
    """Counts the worker threads there are at most."""

    most = 0

    def on_train_batch_end(self, *_: Any) -> None:
        found = [each for each in threading.enumerate() if each.name.startswith("gpipe-worker")]
        self.most = max(self.most, len(found))


def test_one_thread_for_each_device(tmp_path: Path) -> None:
    made = fitted(tmp_path, strategy(), build=CountsThreads, devices=2)

    assert isinstance(made.lightning_module, CountsThreads)
    assert made.lightning_module.most == 2
    assert not [each for each in threading.enumerate() if each.name.startswith("gpipe-worker")]


def test_setup_has_a_line_for_each_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class More(Translator):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Sequential(nn.Linear(2, 2)).double()

    with caplog.at_level(logging.INFO):
        fitted(tmp_path, strategy(), build=More, devices=2, max_steps=1)

    (message,) = [each for each in caplog.messages if each.startswith("GPipe runs")]
    first, second = message.splitlines()
    assert first == (
        "GPipe runs More.layers.encoder (ModuleList) as a pipeline: layers.encoder.0 on cpu, "
        "layers.encoder.1..2 on cpu."
    )
    assert second.startswith("GPipe runs More.layers.decoder (ModuleList) as a pipeline: ")
    assert second.endswith(
        "; around, on cpu: 89 parameters, 15% of all; not piped: 'other' "
        "(module=['layers.encoder', 'layers.decoder', 'other'] pipes them too)."
    )


def test_first_batch_of_each_is_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, strategy(verify=True), build=Translator, devices=2, max_steps=2)

    verified = [each for each in caplog.messages if each.startswith("verified")]
    (message,) = verified
    assert message.startswith("verified: a plain run and one in 3 micro-batches agree, and with ")


def found(module: L.LightningModule) -> Any:
    """Its optimizers."""
    return module.optimizers()


class Networks(L.LightningModule):
    """A GAN whose networks train in turns, by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        ours, theirs = found(self)
        noise = real.flip(1)

        self.toggle_optimizer(ours)
        loss = self._loss(self.generator(noise), real=True)
        self.log("generator_loss", loss)
        ours.zero_grad()
        self.manual_backward(loss)
        ours.step()
        self.untoggle_optimizer(ours)

        self.toggle_optimizer(theirs)
        fake = self.generator(noise).detach()
        loss = self._loss(real, real=True) + self._loss(fake, real=False)
        theirs.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(theirs, gradient_clip_val=0.1)
        theirs.step()
        self.untoggle_optimizer(theirs)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch[0], real=True))

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts], []

    def _loss(self, x: Tensor, *, real: bool) -> Tensor:
        found = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))


class InTurns(Networks):
    """Trains one network in even batches, the other in odd ones."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        k = batch_idx % 2
        made = self.generator(x).square().mean() if k else self._loss(x, real=True)
        optimizer = found(self)[1 - k]
        optimizer.zero_grad()
        self.manual_backward(made)
        optimizer.step()


@pytest.mark.parametrize("build", [Networks, InTurns])
def test_networks_of_a_gan_share_the_devices(tmp_path: Path, build: Any) -> None:
    plain = fitted(tmp_path, build=build)

    networks = GPipeStrategy(
        [[2, 1], [1, 2]], chunks=3, module=["generator", "discriminator"], verify=build is Networks
    )
    piped = fitted(tmp_path, networks, build=build, devices=2)

    assert_same_weights(piped, plain)
    torch.testing.assert_close(dict(piped.callback_metrics), dict(plain.callback_metrics))


class Built(L.LightningModule):
    """Builds its networks, an nn.Sequential and a traced one, in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is None:
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))
            self.head = nn.Module()
            self.head.stack = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.last = nn.Linear(6, CLASSES)
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        assert self.body is not None
        x = self.body(x)
        for block in self.head.stack:  # type: ignore[union-attr]  # an nn.ModuleList
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def built() -> GPipeStrategy:
    return GPipeStrategy([[1, 2], [1, 1]], chunks=3, module=["body", "head.stack"])


def test_modules_of_several_kinds_built_in_configure_model(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Built)

    piped = fitted(tmp_path, built(), build=Built, devices=2)

    assert_same_weights(piped, plain)


def test_checkpoint_is_plain_and_resumes(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Translator)
    begun = fitted(tmp_path, strategy(), build=Translator, devices=2, max_epochs=2)
    path = tmp_path / "half.ckpt"
    begun.save_checkpoint(path)

    resumed = fitted(
        tmp_path, strategy([[2, 1], [1, 3]]), build=Translator, devices=2, ckpt_path=path
    )

    loaded = Translator.load_from_checkpoint(path)
    torch.testing.assert_close(dict(loaded.state_dict()), weights(begun))
    assert_same_weights(resumed, plain)


def test_copies_are_plain_models_and_pipelines_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stacks().double()
    plain = copy.deepcopy(model)
    pipeline = GPipe(model, [[1, 2], [2, 2]], module=["encoder", "decoder"], chunks=3)
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    pipeline(x).sum().backward()

    for copied in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        copied(x).sum().backward()
        torch.testing.assert_close(copied(x), plain(x))
        workers = [each for each in threading.enumerate() if each.name.startswith("gpipe-worker")]
        assert len(workers) == 4, "two of the copy, two of the first"
        copied.close()
    seen: list[Any] = []
    pipeline.observe(seen.append)
    copy.deepcopy(model)(x)
    assert not seen
    pipeline.close()


def test_two_threads_with_one_module_each_take_turns() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Sequential(*six()), "two": nn.Sequential(*six())}).double()
    GPipe(model, [[1, 2], [2, 1]], module=["one", "two"], chunks=3)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    wanted = {name: module(x).detach() for name, module in model.items()}
    found: dict[str, list[Tensor]] = {"one": [], "two": []}

    def runs(name: str) -> None:
        found[name] += [model[name](x).detach() for _ in range(8)]

    threads = [threading.Thread(target=runs, args=(name,), daemon=True) for name in found]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)

    for name, outputs in found.items():
        assert len(outputs) == 8
        for output in outputs:
            torch.testing.assert_close(output, wanted[name])


def six() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]


# A loss for each micro-batch.

CHAINED: dict[str, Any] = {
    "1f1b": [[3], [4]],
    "zero_bubble": [[3], [4]],
    "zero_bubble_v": [[1, 2], [2, 2]],
    "interleaved": [[1, 2], [2, 2]],
}
BLOCK = [[0, 5], [1, 4]]


def chained(schedule: str, **options: Any) -> GPipeStrategy:
    """A strategy that runs both stacks as a chain."""
    balance, chunks = CHAINED[schedule], 2 if schedule == "interleaved" else 3
    name = "1f1b" if schedule == "interleaved" else schedule
    return strategy(balance, **{"schedule": name, "chunks": chunks, **options})


AS_ONE = {"1f1b": [4, 4], "zero_bubble": [3, 5], "zero_bubble_v": [2, 2, 2, 2]}


@pytest.mark.parametrize("schedule", CHAINED)
def test_chain_of_two_stacks(tmp_path: Path, schedule: str) -> None:
    """Also what is logged, and the first batch is verified."""
    plain = fitted(tmp_path, build=Translator)

    piped = fitted(tmp_path, chained(schedule, verify=True), build=Translator, devices=2)

    assert_same_weights(piped, plain)
    torch.testing.assert_close(dict(piped.callback_metrics), dict(plain.callback_metrics))


def test_chain_by_a_block_and_by_parameters(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Translator)
    for balance, options in (([[3], [4]], {"schedule": BLOCK}), ("parameters", {"chunks": 2})):
        made = strategy(balance, **{"schedule": "1f1b", **options})

        piped = fitted(tmp_path, made, build=Translator, devices=2)

        assert_same_weights(piped, plain)


def test_networks_of_several_kinds_as_a_chain(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Built)
    chain = GPipeStrategy(
        [[1, 2], [1, 1]], chunks=2, module=["body", "head.stack"], schedule="1f1b"
    )

    piped = fitted(tmp_path, chain, build=Built, devices=2, accumulate_grad_batches=1)

    assert_same_weights(piped, plain)


def test_checkpoint_of_a_chain_is_plain_and_resumes(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Translator)
    begun = fitted(tmp_path, chained("1f1b"), build=Translator, devices=2, max_epochs=2)
    path = tmp_path / "half.ckpt"
    begun.save_checkpoint(path)

    resumed = fitted(
        tmp_path, chained("zero_bubble_v"), build=Translator, devices=2, ckpt_path=path
    )

    loaded = Translator.load_from_checkpoint(path)
    torch.testing.assert_close(dict(loaded.state_dict()), weights(begun))
    assert_same_weights(resumed, plain)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"balance": [[1, 1, 1], [4]], "schedule": "zero_bubble"},
            "zero_bubble.*a device for each stage: got 4",
        ),
        ({"balance": [[1, 2], [4]]}, "got 3 stages for 2 devices"),
        ({"balance": [[3], [4]], "schedule": "zero_bubble_v"}, "two on each: got 2 stages"),
    ],
    ids=str,
)
def test_chains_that_do_not_fit(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, strategy(**{"schedule": "1f1b", **options}), build=Translator, devices=2)


def fit_chained(
    root: Path, schedule: str, machines: tuple[int, int], replicas: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The parameters that are here after a fit of both stacks as a chain."""
    torch.manual_seed(0)
    model, made = Translator(), chained(schedule)
    given = {
        "chunks": made.options.chunks,
        "module": made.options.module,
        "schedule": made.options.schedule,
    }
    balance: Any = CHAINED[schedule]
    trained = trainer_over(root, "per_stage", balance, {**given, **options}, machines, max_epochs=2)
    trained.fit(model, datamodule=Halves(replicas))
    return {name: x.detach() for name, x in model.named_parameters() if not x.is_meta}


@pytest.mark.parametrize(
    "schedule, options",
    [
        *((schedule, {}) for schedule in CHAINED),
        *((schedule, {"replicas": 2}) for schedule in CHAINED),
        ("zero_bubble_v", {"replicas": 2, "sharding": "parameters"}),
    ],
    ids=str,
)
def test_chain_over_processes(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    schedule: str,
    options: dict[str, Any],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Translator()
        trainer(tmp_path, max_epochs=2).fit(model, datamodule=Halves(1))
    replicas = options.get("replicas", 1)
    ranks, machines = (four_ranks, (4, 1)) if replicas > 1 else (two_ranks, (2, 1))

    found = ranks.run(fit_chained, tmp_path, schedule, machines, replicas, options)

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    for own in found:
        torch.testing.assert_close(own, {name: parameters[name] for name in own})
    assert set().union(*found) == parameters.keys()


def test_outputs_of_a_chain_for_the_last_stage(tmp_path: Path, two_ranks: Pool) -> None:
    for text in two_ranks.run(error_of_last_outputs, tmp_path):
        assert "outputs='last' needs one pipelined module" in text


def error_of_last_outputs(root: Path) -> str:
    return said(lambda: fit_chained(root, "1f1b", (2, 1), 1, {"outputs": "last"}))


@pytest.mark.parametrize("schedule", AS_ONE)
def test_two_stacks_as_one_module(tmp_path: Path, schedule: Any) -> None:
    plain = fitted(tmp_path, build=Translator)
    one = GPipeStrategy(AS_ONE[schedule], chunks=3, module="layers", schedule=schedule)

    piped = fitted(tmp_path, one, build=Translator, devices=2)

    assert_same_weights(piped, plain)


def fit_as_one(
    root: Path, schedule: str, machines: tuple[int, int], replicas: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The parameters that are here after a fit of both stacks as one module."""
    torch.manual_seed(0)
    model = Translator()
    options = {"chunks": 3, "module": "layers", "schedule": schedule, **options}
    balance = AS_ONE[schedule]
    made = trainer_over(root, "per_stage", balance, options, machines, max_epochs=2)
    made.fit(model, datamodule=Halves(replicas))
    return {name: x.detach() for name, x in model.named_parameters() if not x.is_meta}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize("schedule", AS_ONE)
def test_two_stacks_as_one_module_over_processes(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    schedule: Any,
    outputs: str,
    replicas: int,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Translator()
        trainer(tmp_path, max_epochs=2).fit(model, datamodule=Halves(1))
    options: dict[str, Any] = {"outputs": outputs}
    ranks, machines = two_ranks, (2, 1)
    if replicas > 1:
        ranks, machines, options["replicas"] = four_ranks, (4, 1), replicas

    found = ranks.run(fit_as_one, tmp_path, schedule, machines, replicas, options)

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    for own in found:
        torch.testing.assert_close(own, {name: parameters[name] for name in own})
    assert set().union(*found) == parameters.keys()


# Bad input.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"balance": [[1, 2]]}, "a list for each path in module: got a list of 1"),
        ({"balance": [1, 2]}, "a list for each path in module: got a list of 2"),
        ({"balance": [[1, 2], [0, 4]]}, r"balance.*positive|at least one"),
        ({"module": []}, "module must be the path of a module"),
        ({"module": ["a", None]}, "module must be the path of a module"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GPipeStrategy(**({"balance": [[1, 2], [1, 2]], "module": ["a", "b"]} | options))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"module": ["layers.encoder", "layers.coder"]}, "got 'layers.coder', where there is none"),
        ({"module": ["layers.encoder", "layers.encoder"]}, "within one another|twice"),
        ({"balance": [[1, 2], [2, 3]]}, r"got balance=\[2, 3\] \(sum 5\)"),
        ({"balance": [[1, 2], [1, 1, 2]]}, "got 3 stages for 2 devices"),
    ],
    ids=str,
)
def test_modules_that_do_not_fit(tmp_path: Path, options: Any, message: str) -> None:
    given = {"balance": [[1, 2], [2, 2]], "module": ["layers.encoder", "layers.decoder"]} | options
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, GPipeStrategy(**given), build=Translator, devices=2)

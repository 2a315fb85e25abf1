"""Unchanged model: models that loop over blocks train as without the strategy.

A model that loops over an nn.ModuleList, one that is traced, and a Llama of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are not among our extras
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.commands.fit import main
from lightning_gpipe.core.frontends.pretrained import parameters_on_meta
from tests.support.language_models import NETWORKS, LanguageModel, Looped, Text
from tests.support.lightning_modules import trainer, weights

PATHS: dict[str, Any] = {
    "looped": {"module": "net.blocks", "balance": [1, 3]},
    "traced": {"module": "net", "balance": ["down"]},
    "llama": {"module": "net.model.layers", "balance": [3, 1]},
}
KINDS = ["looped", "traced"]
every_kind = pytest.mark.parametrize("kind", [*KINDS, "llama"])


@pytest.fixture(autouse=True)
def _needs_transformers(request: pytest.FixtureRequest) -> None:
    if "llama" in request.node.name or "t5" in request.node.name:
        pytest.importorskip("transformers", reason="needs transformers: pip install transformers")


def strategy(kind: str, **options: Any) -> GPipeStrategy:
    return GPipeStrategy(**(PATHS[kind] | {"chunks": 3} | options))


def fitted(
    path: Path, kind: str, strategy: Any = "auto", *, build: Any = LanguageModel, **options: Any
) -> L.Trainer:
    torch.manual_seed(0)
    model = build(kind)
    ckpt_path = options.pop("ckpt_path", None)
    made = trainer(path, strategy, devices=1 if strategy == "auto" else 2, **options)
    made.fit(model, datamodule=Text(), ckpt_path=ckpt_path)
    return made


def same(one: L.Trainer, other: L.Trainer, tolerance: float = 1e-6) -> None:
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(weights(one), weights(other), **close)
    torch.testing.assert_close(dict(one.callback_metrics), dict(other.callback_metrics), **close)


class Twice(LanguageModel):
    """Two forwards before one backward."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(ids) + 2 * self.loss(ids[:5].flip(1))
        self.log("train_loss", loss)
        return loss


OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.05, "mode": "always"},
    {"build": Twice},
    {"precision": "bf16-mixed", "tolerance": 3e-2},
    {"precision": "bf16-true", "tolerance": 6e-2},
    {"precision": "16-true", "tolerance": 1e-2},
]
FEW: dict[str, Any] = {"build": Twice, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


@pytest.mark.parametrize(
    "kind, options", [*((k, o) for k in KINDS for o in OPTIONS), ("llama", FEW)], ids=str
)
def test_fit_is_that_of_one_device(tmp_path: Path, kind: str, options: Any) -> None:
    given = dict(options)
    tolerance, mode = given.pop("tolerance", 1e-6), given.pop("mode", "except_last")
    plain = fitted(tmp_path, kind, max_epochs=2, **given)

    made = strategy(kind, activation_checkpointing=mode)
    piped = fitted(tmp_path, kind, made, max_epochs=2, **given)

    same(piped, plain, tolerance)
    assert made.pipeline is None


@every_kind
def test_checkpoint_is_plain_and_resumes_with_another_balance(tmp_path: Path, kind: str) -> None:
    plain = fitted(tmp_path, kind)
    begun = fitted(tmp_path, kind, strategy(kind), max_epochs=2)
    path = tmp_path / "half.ckpt"
    begun.save_checkpoint(path)

    again = strategy(kind, balance="parameters")
    resumed = fitted(tmp_path, kind, again, ckpt_path=path)

    saved = torch.load(path, weights_only=False)
    assert list(saved["state_dict"]) == list(plain.lightning_module.state_dict())
    loaded = LanguageModel.load_from_checkpoint(path)
    torch.testing.assert_close(dict(loaded.state_dict()), weights(begun))
    same(resumed, plain)


@every_kind
def test_first_batch_is_verified(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        one = fitted(tmp_path, kind, strategy(kind, verify=True), max_epochs=1)

    (message,) = [each for each in caplog.messages if each.startswith("verified")]
    assert "agree, and with the model's own forward" in message
    assert not one.lightning_module._forward_pre_hooks
    other = fitted(tmp_path, kind, strategy(kind), max_epochs=1)
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


class Speaks(LanguageModel):
    """Generates while it is validated."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.said: list[Tensor] = []

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        super().validation_step(ids, batch_idx)
        made: Tensor = self.net.generate(  # type: ignore[operator]  # a model of transformers
            ids[:, :3], attention_mask=torch.ones_like(ids[:, :3]), max_new_tokens=4, use_cache=True
        )
        self.said.append(made.cpu())


@pytest.mark.filterwarnings("ignore:past_key_values:UserWarning")  # told of once
def test_generation_in_validation_of_a_llama(tmp_path: Path) -> None:
    plain = fitted(tmp_path, "llama", build=Speaks)

    piped = fitted(tmp_path, "llama", strategy("llama"), build=Speaks)

    same(piped, plain)
    said: list[Any] = [made.lightning_module.said for made in (plain, piped)]
    assert len(said[0]) == len(said[1]) == 8  # two batches of sanity checking, and of each epoch
    for one, other in zip(*said, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("balance", [[[1, 2], [3, 1]], "parameters"], ids=str)
def test_fit_of_both_stacks_of_a_t5(tmp_path: Path, balance: Any) -> None:
    plain = fitted(tmp_path, "t5", max_epochs=1)
    stacks = GPipeStrategy(
        balance, 3, module=["net.encoder.block", "net.decoder.block"], verify=True
    )

    piped = fitted(tmp_path, "t5", stacks, max_epochs=1)

    same(piped, plain)


class Late(LanguageModel):
    """Builds the model in configure_model, on the meta device."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            # A Llama computes buffers that no checkpoint has.
            llama = self.hparams["kind"] == "llama"
            with parameters_on_meta() if llama else torch.device("meta"):
                self.net = NETWORKS[self.hparams["kind"]]().double()


@every_kind
def test_model_built_on_meta_gets_the_weights_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    begun = fitted(tmp_path, kind, max_epochs=1)
    path = tmp_path / "first.ckpt"
    begun.save_checkpoint(path)
    plain = fitted(tmp_path, kind)

    piped = fitted(tmp_path, kind, strategy(kind), build=Late, ckpt_path=path)

    same(piped, plain)
    models: list[Any] = [made.lightning_module for made in (piped, plain)]
    one, other = ([*dict(each.named_parameters())] for each in models)
    assert one == other, "what was tied is tied"


@pytest.mark.parametrize("kind", ["looped", "traced"])
def test_model_built_on_meta_is_initialised(tmp_path: Path, kind: str) -> None:
    piped = fitted(tmp_path, kind, strategy(kind), build=Late, max_epochs=1)

    assert all(tensor.isfinite().all() for tensor in weights(piped).values())


@pytest.mark.parametrize("balance", [["net.blocks.2"], ["2"], [2, 2], "parameters"], ids=str)
def test_balances(tmp_path: Path, balance: Any) -> None:
    seen: list[Any] = []

    class Looks(LanguageModel):
        def on_train_start(self) -> None:
            made = self.trainer.strategy
            assert isinstance(made, GPipeStrategy) and made.pipeline is not None
            seen.append(made.pipeline.balance)

    fitted(tmp_path, "looped", strategy("looped", balance=balance), build=Looks, fast_dev_run=True)

    # The embedding, which is as heavy as a block, is on the last device.
    assert seen == [[3, 1] if balance == "parameters" else [2, 2]]


@pytest.mark.usefixtures("lightning_cli")
def test_configuration(tmp_path: Path) -> None:
    values = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_gpipe.GPipeStrategy",
                "init_args": {"module": "net.blocks", "balance": ["net.blocks.3"], "chunks": 3},
            },
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": str(tmp_path),
        },
        "model": {"class_path": "tests.support.language_models.LanguageModel"},
        "data": {"class_path": "tests.support.language_models.Text"},
    }
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")

    cli = main(["fit", "--config", str(path)])

    same(cli.trainer, fitted(tmp_path, "looped", max_epochs=2))


# Bad input.


class Wrong(LanguageModel):
    """Its forward does not do what a loop over blocks must."""

    def __init__(self, kind: str) -> None:
        super().__init__("looped")
        net = self.net
        assert isinstance(net, Looped)
        calls = {
            "never": [],
            "forward": [*net.blocks],
            "twice": [*net.blocks, net.blocks[0]],
            "the same twice": [net.blocks[0], net.blocks[0], *net.blocks[1:]],
            "ends early": [*net.blocks][:2],
        }[kind]
        self.net = WrongNet(net, calls, direct=kind == "forward").double()


class WrongNet(nn.Module):
    """Calls some blocks."""

    def __init__(self, net: Looped, calls: list[nn.Module], *, direct: bool) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = net.embedding, net.blocks, net.head
        self._calls = [lambda each=each: each for each in calls]
        self._direct = direct

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.ones(ids.size(1), ids.size(1), dtype=x.dtype)
        for call in self._calls:
            block = call()
            x = block.forward(x, mask) if self._direct else block(x, mask)
        return self.head(x)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("never", "the forward of WrongNet must call the blocks of module='net.blocks'"),
        ("forward", r"the forward of WrongNet must call the blocks.*block\.forward\(x\)"),
        ("twice", "one that calls a block again after the last cannot be cut here"),
        ("the same twice", "got a call of net.blocks.0 at .* where net.blocks.1 is next"),
        ("ends early", "ended without net.blocks.2 to net.blocks.3"),
    ],
    ids=str,
)
def test_loop_that_cannot_be_cut(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fitted(tmp_path, kind, strategy("looped"), build=Wrong)


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    class Three(LanguageModel):
        def __init__(self, kind: str) -> None:
            super().__init__(kind)
            self.net = nn.ModuleDict({name: Looped() for name in "abc"})

    with pytest.raises(
        ValueError, match=r"Choose one .*\n  module='net.a.blocks': ModuleList of 4"
    ):
        fitted(tmp_path, "looped", GPipeStrategy([1, 3]), build=Three)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"module": "net.block"}, "got 'net.block', where there is none. It holds 'net.blocks'"),
        ({"balance": [1, 4]}, r"got balance=\[1, 4\] \(sum 5\) for the 4 layers of Lang"),
        ({"balance": [1, 1, 2]}, "got 3 stages for 2 devices"),
        ({"balance": ["net.blocks.9"]}, "got 'net.blocks.9', and no unit"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, "looped", strategy("looped", **options))

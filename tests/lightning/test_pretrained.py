"""Transparency: fine-tuning a pretrained Llama reads its weights stage by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.frontends.pretrained import load_pretrained, parameters_on_meta
from tests.support.language_models import llama, rows
from tests.support.lightning_modules import trainer

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install transformers"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, in shards."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    llama().double().save_pretrained(path, max_shard_size="10KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


class Tuned(L.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(ids, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Late(Tuned):
    """Built without memory, and only where it is trained."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            config = transformers.LlamaConfig.from_pretrained(self.folder)
            with parameters_on_meta():
                self.model = transformers.LlamaForCausalLM(config).double()
            load_pretrained(self.model, self.folder)


def data() -> DataLoader[Any]:
    return DataLoader(rows(12, seed=3), batch_size=4)  # type: ignore[arg-type]  # a tensor


def strategy(**options: Any) -> GPipeStrategy:
    return GPipeStrategy([1, 3], 2, module="model.model.layers", **options)


def usual(folder: Path) -> Tuned:
    return Tuned(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    )


def plainly(folder: Path, path: Path, **options: Any) -> L.Trainer:
    made = trainer(path, **options)
    made.fit(usual(folder), data(), data())
    return made


def test_fit_as_from_pretrained(folder: Path, tmp_path: Path) -> None:
    plain = plainly(folder, tmp_path)
    made = trainer(tmp_path, strategy(verify=True), devices=2)

    made.fit(Late(folder), data(), data())

    found, expected = made.lightning_module.state_dict(), plain.lightning_module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_evaluation_then_fit(folder: Path, tmp_path: Path) -> None:
    [expected] = trainer(tmp_path).validate(usual(folder), data(), verbose=False)
    made = trainer(tmp_path, strategy(), devices=2, max_epochs=1)
    model = Late(folder)

    [found] = made.validate(model, data(), verbose=False)
    made.fit(model, data(), data())

    torch.testing.assert_close(found, expected)


def test_resume(folder: Path, tmp_path: Path) -> None:
    whole = plainly(folder, tmp_path, max_epochs=2)
    made = trainer(tmp_path, strategy(), devices=2, max_epochs=1)
    made.fit(Late(folder), data(), data())
    made.save_checkpoint(tmp_path / "half.ckpt")
    again = trainer(tmp_path, strategy(), devices=2, max_epochs=2)

    again.fit(Late(folder), data(), data(), ckpt_path=tmp_path / "half.ckpt")

    for name, value in whole.lightning_module.state_dict().items():
        torch.testing.assert_close(again.lightning_module.state_dict()[name], value)


def test_half_precision(folder: Path, tmp_path: Path) -> None:
    made = trainer(tmp_path, strategy(), devices=2, precision="bf16-true", fast_dev_run=True)
    model = Late(folder)

    made.fit(model, data(), data())

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_without_parameters_on_meta(folder: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))

    with pytest.raises(TypeError, match=r"got LlamaRotaryEmbedding without.*parameters_on_meta"):
        load_pretrained(model, folder)

"""Quantised Llamas with adapters, as people fine-tune them: bitsandbytes or torchao, and PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _library in ("transformers", "peft", "bitsandbytes", "torchao"):
        pytest.importorskip(_library, reason="needs the libraries of make models")
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    from tests.models.peft_models import in_4_bits, in_8_bits, of_torchao, quantised_llama

from lightning_gpipe import GPipe
from tests.support.language_models import rows

# By peft 0.21: of what it calls in transformers, and of merging, which is not done here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),
]


def adapted_llama(quantised: Any) -> Any:
    """Quantised, on its device, with adapters that change the output."""
    torch.manual_seed(0)
    model = quantised_llama(quantised, use_cache=False)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("quantised", [in_4_bits, in_8_bits, of_torchao])
def test_adapters_on_a_quantised_llama(quantised: Any, mode: Any) -> None:
    plain, model = adapted_llama(quantised), adapted_llama(quantised)
    blocks = "base_model.model.model.layers"
    weight = f"{blocks}.1.mlp.down_proj.base_layer.weight"
    kind = type(model.get_parameter(weight))
    assert kind is not nn.Parameter
    pipeline = GPipe(
        model,
        [1, 3],
        module=blocks,
        devices=["cpu"] * 2,
        chunks=3,
        activation_checkpointing=mode,
    )
    ids = rows(6, seed=0)

    for _ in range(2):
        found, expected = pipeline(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits)
        found.loss.backward()
        expected.loss.backward()

    assert type(model.get_parameter(weight)) is kind
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    pipeline.close()


def shared_by_layers(quantised: Any) -> Any:
    """Its first and its last block have one quantised weight."""
    model = adapted_llama(quantised)
    blocks = model.base_model.model.model.layers
    blocks[3].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    return model


@pytest.mark.parametrize("quantised", [in_4_bits, of_torchao])
def test_quantised_weight_that_stages_of_one_device_share(quantised: Any) -> None:
    plain, model = shared_by_layers(quantised), shared_by_layers(quantised)
    blocks = "base_model.model.model.layers"
    pipeline = GPipe(model, [1, 3], module=blocks, devices=["cpu"] * 2, chunks=3)
    ids = rows(6, seed=0)

    found, expected = pipeline(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()

    one, other = (model.get_submodule(f"{blocks}.{k}.mlp.up_proj").weight for k in (0, 3))
    assert one is other
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    pipeline.close()


def test_quantised_embedding_that_is_the_weight_of_the_head() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        embedding = bnb.nn.Embedding4bit(32, 64, dtype=torch.float32, quant_type="nf4")
        head = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        made = nn.Sequential(embedding, nn.Linear(64, 64), nn.Tanh(), head).to("cpu")
        head.weight = embedding.weight
        return made

    plain, model = tied(), tied()
    pipeline = GPipe(model, [2, 2], devices=["cpu"] * 2, chunks=3)
    ids = rows(6, seed=0) % 32

    found, expected = pipeline(ids), plain(ids)
    torch.testing.assert_close(found, expected)
    found.square().mean().backward()
    expected.square().mean().backward()

    assert model[0].weight is model[3].weight
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad)
    pipeline.close()

"""A Llama that accelerate has spread, as ``from_pretrained(device_map=...)`` does, piped."""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _library in ("transformers", "accelerate"):
        pytest.importorskip(_library, reason="needs the libraries of make models")
    from accelerate import dispatch_model

from lightning_gpipe import GPipe
from tests.support.language_models import llama, rows


def test_llama_that_was_dispatched() -> None:
    plain = llama(num_hidden_layers=3, tie_word_embeddings=False)
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys([*parts, *(f"model.layers.{k}" for k in range(3))], "cpu")
    model = dispatch_model(deepcopy(plain), device_map, force_hooks=True)
    assert "_hf_hook" in vars(model.model.layers[0])
    ids = rows(4, seed=0)

    pipeline = GPipe(model, [1, 2], module="model.layers", devices=["cpu"] * 2, chunks=2)

    found, expected = pipeline(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    added = {"_hf_hook", "_old_forward", "forward", "hf_device_map", "to", "cuda"}
    pipeline.release()
    assert not [each for each in model.modules() if added & vars(each).keys()]
    pipeline.close()

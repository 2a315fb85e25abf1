"""How often the blocks of known models run before the first mini-batch does.

Once for each kind of block, and once or twice more for each argument that may have rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from lightning_gpipe import GPipe
from lightning_gpipe.core.faithful import is_recomputing
from tests.models.hugging_face import CASES


@pytest.mark.parametrize(
    "name, padded, expected",
    [
        ("ViTForImageClassification", True, [1]),
        ("LlamaForCausalLM", False, [1]),
        ("LlamaForCausalLM", True, [2]),
        ("MixtralForCausalLM (router loss)", False, [1]),
        ("MixtralForCausalLM (router loss)", True, [2]),
        ("BloomForCausalLM", False, [3]),
        ("BloomForCausalLM", True, [3]),
        # The first block of a T5 makes a bias that the others get. Its decoder gets masks of its
        # own and of the encoder, and what the encoder returns.
        ("T5ForConditionalGeneration", False, [2, 4]),
        ("T5ForConditionalGeneration", True, [4, 6]),
    ],
)
def test_rehearsals_of_each_kind_of_block(name: str, padded: bool, expected: list[int]):
    (case,) = (case for case in CASES if case.name == name)
    paths = [case.module] if isinstance(case.module, str) else list(case.module)
    tried: Counter[str] = Counter()

    def count(path: str) -> Any:
        def hook(*_: Any) -> None:
            tried[path] += is_recomputing()

        return hook

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about configurations as small as ours
        model: Any = case.build().train()
        batch = dict(case.inputs(torch.Generator().manual_seed(0)))
        for part in model.modules():
            if hasattr(part, "config"):  # with a cache, a call is tried once more
                part.config.use_cache = False
        for path in paths:
            for block in model.get_submodule(path).children():
                block.register_forward_pre_hook(count(path))
        if not padded and "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        pipeline = GPipe(model, [[2, 2]] * len(paths), module=paths, devices=["cpu"] * 2, chunks=3)
        for _ in range(2):
            pipeline(**batch)

    assert [tried[path] for path in paths] == expected

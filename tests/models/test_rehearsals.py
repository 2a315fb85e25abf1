"""How often the blocks of known models run before the first mini-batch does: once for each kind."""

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


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("ViTForImageClassification", [1]),
        ("LlamaForCausalLM", [1]),
        ("MixtralForCausalLM (router loss)", [1]),
        ("BloomForCausalLM", [1]),
        # The first block of a T5 makes a bias that the others get.
        ("T5ForConditionalGeneration", [2, 2]),
    ],
)
def test_one_rehearsal_for_each_kind_of_block(name: str, expected: list[int], padded: bool):
    (case,) = (case for case in CASES if case.name == name)
    paths = [case.module] if isinstance(case.module, str) else list(case.module)
    tried: Counter[str] = Counter()

    def count(path: str) -> Any:
        def hook(*_: Any) -> None:
            tried[path] += is_recomputing()

        return hook

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about configurations as small as ours
        model, batch = case.build().train(), dict(case.inputs(torch.Generator().manual_seed(0)))
        for path in paths:
            for block in model.get_submodule(path).children():
                block.register_forward_pre_hook(count(path))
        if not padded and "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        pipeline = GPipe(model, [[2, 2]] * len(paths), module=paths, devices=["cpu"] * 2, chunks=3)
        for _ in range(2):
            pipeline(**batch)

    assert [tried[path] for path in paths] == expected

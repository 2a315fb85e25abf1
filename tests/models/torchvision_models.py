"""torchvision's models for classification, in full but for the images, and some for segmentation.

They are traced as they are. Dropout and stochastic depth are 0, as a pipeline draws other masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from tests.models.case import ROWS, Case

_SIZES = {"inception_v3": 75, "maxvit_t": 224, "alexnet": 64}
_TOO_LARGE = 150e6  # parameters
_LARGE = 60e6


def _build(name: str, more: Mapping[str, Any]) -> nn.Module:
    if name in ("googlenet", "inception_v3"):  # the second one's auxiliary head needs large images
        more = {"init_weights": False, "aux_logits": name == "googlenet", **more}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **more)
    for module in model.modules():
        if isinstance(module, nn.Dropout | StochasticDepth):
            module.p = 0.0
    return model


def _images(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 3, size, size, generator=generator)}


def _case(name: str) -> Case:
    size = _SIZES.get(name, 32)
    more: dict[str, Any] = {"num_classes": 10}
    if name.startswith("vit_"):
        more |= {"image_size": size}
    return Case(
        name,
        partial(_build, name, more),
        partial(_images, size),
        dtype=torch.float64,
        mixes=True,
        large=_parameters(name) > _LARGE or size > 200,
    )


def _parameters(name: str) -> int:
    """The number that torchvision gives with its weights."""
    weights = torchvision.models.get_model_weights(name)
    count: int = next(iter(weights)).meta["num_params"]
    return count


_NAMES = torchvision.models.list_models(module=torchvision.models)
CASES = [_case(name) for name in _NAMES if _parameters(name) < _TOO_LARGE]

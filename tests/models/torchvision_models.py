"""torchvision's models for classification and segmentation, and some for detection.

They are as published but for the size of the images and the number of classes, and are traced as
they are. Of a detector, which takes lists of images, it is the backbone that is pipelined. Dropout
and stochastic depth are 0, as a pipeline draws other masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

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


def _images(size: int, generator: torch.Generator, *, name: str = "x") -> dict[str, Tensor]:
    return {name: torch.randn(ROWS, 3, size, size, generator=generator)}


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


def _segmentation(name: str) -> Case:
    more = {"num_classes": 5, "weights_backbone": None}
    return Case(
        name,
        partial(_build, name, more),
        partial(_images, 32, name="input" if name.startswith("lraspp") else "x"),
        dtype=torch.float64,
        mixes=True,
        large=True,
    )


def _detector(kind: type[nn.Module], **options: Any) -> nn.Module:
    """A detector for images of 32 by 32, with norms that do not depend on the batch."""
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=5
    )
    return kind(backbone, num_classes=5, min_size=32, max_size=32, **options)


def _detection(generator: torch.Generator) -> dict[str, Any]:
    """Images, and two boxes on each; in evaluation the model does not look at them."""
    boxes = torch.tensor([[2.0, 3.0, 17.0, 19.0], [10.0, 8.0, 30.0, 29.0]])
    targets = [
        {"boxes": boxes + k % 2, "labels": torch.tensor([1, 2 + k % 3])} for k in range(ROWS)
    ]
    return {"images": [*torch.rand(ROWS, 3, 32, 32, generator=generator)], "targets": targets}


_RETINA = partial(_detector, RetinaNet, score_thresh=0.0, topk_candidates=5)
_FCOS = partial(_detector, FCOS, score_thresh=0.0, topk_candidates=5)
_NAMES = torchvision.models.list_models(module=torchvision.models)
_SEGMENTATION = torchvision.models.list_models(module=torchvision.models.segmentation)
CASES = [
    *(_case(name) for name in _NAMES if _parameters(name) < _TOO_LARGE),
    *(_segmentation(name) for name in _SEGMENTATION if "101" not in name),
    Case("RetinaNet, resnet18", _RETINA, _detection, "backbone", dtype=torch.float64),
    Case("FCOS, resnet18", _FCOS, _detection, "backbone", dtype=torch.float64),
]

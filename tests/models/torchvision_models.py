"""torchvision's models for classification and segmentation, and some for detection.

They are as published but for the size of the images and the number of classes, and are traced as
they are. Of a detector, which takes lists of images, it is the backbone that is pipelined. Dropout
and stochastic depth are 0, as a pipeline draws other masks.

Those with more than 25 million parameters are made smaller: of equal blocks one after another two
stay; AlexNet and VGG pool to one place before their classifier; and the largest RegNet is narrower.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import VGG, AlexNet, RegNet
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.regnet import BlockParams
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

from tests.models.case import ROWS, Case

_SIZES = {"inception_v3": 75, "maxvit_t": 224, "alexnet": 64, "vit_h_14": 28}
_LARGE = 25e6  # parameters
_NARROW = {"regnet_y_128gf": (27, 56, 20.1, 2.52, 32)}


def _build(name: str, more: Mapping[str, Any]) -> nn.Module:
    if name in ("googlenet", "inception_v3"):  # the second one's auxiliary head needs large images
        more = {"init_weights": False, "aux_logits": name == "googlenet", **more}
    model = _narrow(*_NARROW[name]) if name in _NARROW else _published(name, more)
    for module in model.modules():
        if isinstance(module, nn.Dropout | StochasticDepth):
            module.p = 0.0
    return model


def _published(name: str, more: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = torchvision.models.get_model(name, weights=None, **more)
    if isinstance(model, AlexNet | VGG):
        first = next(k for k, m in enumerate(model.classifier) if isinstance(m, nn.Linear))
        size = model.avgpool.output_size
        channels = model.classifier[first].in_features // (size[0] * size[1])
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier[first] = nn.Linear(channels, model.classifier[first].out_features)
    return shortened(model) if sum(p.numel() for p in model.parameters()) > _LARGE else model


def _narrow(depth: int, w_0: int, w_a: float, w_m: float, group_width: int) -> nn.Module:
    """A RegNet with squeeze and excitation."""
    blocks = BlockParams.from_init_params(depth, w_0, w_a, w_m, group_width, se_ratio=0.25)
    return RegNet(blocks, num_classes=10)


def shortened(model: nn.Module) -> nn.Module:
    """The model with two of all equal blocks that follow one another in a Sequential."""
    for module in [*model.modules()]:
        if isinstance(module, nn.Sequential):
            kept: list[tuple[str, nn.Module]] = []
            for name, child in module.named_children():
                if [_shapes(child)] * 2 != [_shapes(each) for _, each in kept[-2:]]:
                    kept.append((name, child))
            module._modules = dict(kept)
    return model


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    """What blocks that are equal have in common."""
    return type(module), *((name, x.shape) for name, x in module.named_parameters())


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
        large=_published_size(name) > _LARGE or size > 200,
    )


def _published_size(name: str) -> int:
    """The number of parameters that torchvision gives with its weights."""
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
    *(_case(name) for name in _NAMES),
    *(_segmentation(name) for name in _SEGMENTATION if "101" not in name),
    Case("RetinaNet, resnet18", _RETINA, _detection, "backbone", dtype=torch.float64),
    Case("FCOS, resnet18", _FCOS, _detection, "backbone", dtype=torch.float64),
]

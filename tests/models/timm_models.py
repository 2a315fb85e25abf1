"""timm's models, one or two of each of many families, mostly the smallest.

They are traced as they are. Some have timm's own batch norms, which activate too. Those that look
at the size of the images in their forward cannot be traced: of them, the blocks are pipelined.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from tests.models.case import ROWS, Case

_SIZE = 64
_SMALL = 32


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0
        elif isinstance(getattr(module, "drop_rate", None), float):  # of F.dropout in its forward
            vars(module)["drop_rate"] = 0.0
    return model


def _images(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 3, size, size, generator=generator)}


def _case(
    name: str,
    size: int = _SMALL,
    *,
    module: str = "",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    return Case(
        name,
        partial(_build, name, options),
        partial(_images, size),
        module,
        dtype=dtype,
        mixes=True,
    )


CASES = [
    # Convolutional networks.
    _case("resnet10t"),
    _case("resnet18"),
    _case("resnet26d"),
    _case("seresnet33ts"),
    _case("ecaresnet26t"),
    _case("skresnet18"),
    _case("resnest14d"),
    _case("res2net50_14w_8s"),
    _case("resnetv2_18"),
    _case("test_resnet"),
    _case("densenet121"),
    _case("dla34"),
    _case("dpn48b"),
    _case("cs3darknet_focus_s"),
    _case("darknet17"),
    _case("efficientnet_b0"),
    _case("test_efficientnet"),
    _case("test_efficientnet_gn"),
    _case("mobilenetv2_050"),
    _case("mobilenetv3_small_050"),
    _case("mobilenetv4_conv_small_050"),
    _case("lcnet_050"),
    _case("mnasnet_050"),
    _case("tinynet_e"),
    _case("hardcorenas_a"),
    _case("ghostnet_050"),
    _case("repghostnet_050"),
    _case("mobileone_s0"),
    _case("repvgg_a0"),
    _case("repvit_m0_9"),
    _case("regnetx_002"),
    _case("regnety_002"),
    _case("nf_regnet_b0"),
    _case("test_nfnet"),
    _case("rexnet_100"),
    _case("selecsls42"),
    _case("hgnetv2_b0"),
    _case("starnet_s050"),
    _case("fasternet_t0"),
    _case("ese_vovnet19b_slim"),
    _case("convnext_atto"),
    _case("convnextv2_atto"),
    _case("test_convnext"),
    _case("inception_next_atto"),
    _case("mambaout_femto"),
    _case("test_byobnet"),
    _case("vgg11_bn", mlp_ratio=0.05),  # with all weights, its settings take 20 GB
    # Transformers, and those that are half of each.
    _case("vit_tiny_patch16_224", _SIZE, img_size=_SIZE),
    _case("test_vit", _SIZE, module="blocks", img_size=_SIZE),
    _case("test_vit2", _SIZE, module="blocks", img_size=_SIZE),
    _case("deit_tiny_patch16_224", _SIZE, img_size=_SIZE),
    _case("deit_tiny_distilled_patch16_224", _SIZE, img_size=_SIZE),
    _case("cait_xxs24_224", _SIZE, img_size=_SIZE),
    _case("eva02_tiny_patch14_224", 56, img_size=56),
    _case("mixer_s32_224", _SIZE, img_size=_SIZE),
    _case("gmlp_s16_224", _SIZE, img_size=_SIZE),
    _case("resmlp_12_224", _SIZE, img_size=_SIZE),
    _case("poolformer_s12"),
    _case("xcit_nano_12_p16_224", _SIZE, img_size=_SIZE),
    _case("pit_ti_224", _SIZE, img_size=_SIZE),
    _case("levit_128s", 224),
    _case("mobilevit_xxs"),
    _case("mobilevitv2_050"),
    _case("edgenext_xx_small"),
    _case("efficientformer_l1", 224),
    _case("efficientvit_b0", dtype=torch.float32),  # which its attention computes in anyway
    _case("efficientvit_m0", 224),
    _case("fastvit_t8"),
    _case("pvt_v2_b0"),
    _case("swin_tiny_patch4_window7_224", 56, img_size=56),
    _case("visformer_tiny", _SIZE, img_size=_SIZE),
    _case("tnt_s_legacy_patch16_224", _SIZE, img_size=_SIZE),
    _case("convmixer_768_32"),
]

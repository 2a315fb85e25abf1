"""Quantised weights that stages on several devices share: copied whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipe
from tests.gpu.models import GPU, ON_GPU, WIDTH, assert_same
from tests.support.quantised import Adapted, OfTwo, WithScale, sequential
from tests.support.quantised import Loop as Looped

pytestmark = ON_GPU


def sharing(
    kind: Callable[[nn.Linear], nn.Module], made: Callable[[nn.Sequential], nn.Module]
) -> nn.Module:
    """Layers of which the first and the last have one quantised weight."""
    torch.manual_seed(0)
    layers = [Adapted(kind(nn.Linear(WIDTH, WIDTH).double()), WIDTH).double() for _ in range(4)]
    shared: Any = layers[0].base.weight
    layers[3].base.weight = shared
    return made(nn.Sequential(*layers))


def path_of(model: nn.Module) -> str | None:
    return None if isinstance(model, nn.Sequential) else "layers"


@pytest.mark.parametrize("made", [sequential, Looped])
def test_weight_made_of_tensors_is_copied_whole(
    made: Callable[[nn.Sequential], nn.Module],
) -> None:
    plain = sharing(OfTwo, made)
    model = deepcopy(plain)
    pipeline = GPipe(model, [2, 2], module=path_of(model), devices=[GPU, "cpu"], chunks=3)

    for seed in range(2):
        x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        found, expected = pipeline(x), plain(x)
        assert_same(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()

    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad)
    pipeline.close()


@pytest.mark.parametrize("made", [sequential, Looped])
def test_weight_with_scales_elsewhere_is_refused(
    made: Callable[[nn.Sequential], nn.Module],
) -> None:
    model = sharing(WithScale, made)
    expected = "weight of a WithScale, a Scaled with tensors in scale, on cpu and cuda:0"
    with pytest.raises(ValueError, match=expected):
        GPipe(model, [2, 2], module=path_of(model), devices=[GPU, "cpu"], chunks=3)

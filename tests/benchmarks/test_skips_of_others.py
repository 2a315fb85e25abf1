"""A model with our skip connections, in the words of another package: here in our own again."""

import torch
from torch import nn

from benchmarks.contestants.skips import with_skips_of
from benchmarks.models import unet
from lightning_gpipe import skip
from tests.support.models import assert_same, step


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return unet(1, 2).double().eval()


def test_translated_model_computes_the_same() -> None:
    module, translated = small(), with_skips_of(skip, small())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)

    expected, actual = step(module, images), step(translated, images)

    assert_same(actual.output, expected.output)
    assert_same(actual.input_gradients, expected.input_gradients)
    assert_same(list(actual.gradients.values()), list(expected.gradients.values()))


def test_parameters_stay_the_same_objects() -> None:
    module = small()

    translated = with_skips_of(skip, module)

    for one, other in zip(translated.parameters(), module.parameters(), strict=True):
        assert one is other


def test_namespaces_stay_apart() -> None:
    translated = with_skips_of(skip, small())

    skippable = [layer for layer in translated if hasattr(layer, "isolate")]
    names = [layer.__dict__["_namespaces"]["skip"] for layer in skippable]

    assert names[:5] == names[5:][::-1]
    assert len(set(names)) == 5
    skip.verify_skippables(nn.Sequential(*skippable))

"""Rounding errors that are added to the outputs of layers."""

import torch
from torch import Tensor, nn

from lightning_gpipe.core.verify.rounding import perturbed

X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


def test_errors_do_not_depend_on_the_order_of_the_layers() -> None:
    """Stages run on threads: with one generator for all layers, a verification differed by run."""
    layers = [nn.Identity(), nn.Identity()]
    runs: list[list[Tensor]] = []
    for order in ([0, 1], [1, 0]):
        with perturbed(layers):
            outputs = {k: layers[k](X) for k in order}
        runs.append([outputs[0], outputs[1]])

    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_errors_are_those_of_rounding() -> None:
    layer = nn.Identity()

    with perturbed([layer]):
        y = layer(X)

    assert not torch.equal(y, X)
    torch.testing.assert_close(y, X, rtol=1e-14, atol=0)
    assert torch.equal(layer(X), X)


def test_integers_stay_as_they_are() -> None:
    layer = nn.Identity()

    with perturbed([layer]):
        assert torch.equal(layer(torch.arange(3)), torch.arange(3))

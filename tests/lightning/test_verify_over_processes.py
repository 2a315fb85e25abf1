"""Reported: verify=True also compares processes, each the values of its own stages."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, PaddedSequences, verify
from tests.lightning.test_processes import assert_equal
from tests.support.language_models import LanguageModel, Text
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, Data, six_layers
from tests.support.models import Centred
from tests.support.processes import said
from tests.support.ranks import Pool, group_of
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Averaged(torch.autograd.Function):
    """Has a backward that depends on the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].size(0)


class ByRows(nn.Linear):
    """Has a gradient that depends on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Averaged.apply(super().forward(x))
        return output


class Noise(nn.Module):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def with_layer(k: int, build: Callable[[], nn.Module]) -> nn.Sequential:
    layers = six_layers()
    layers[k] = build()
    return layers


def frozen(*stages: slice) -> nn.Sequential:
    """Six layers, some of which are not trained."""
    layers = six_layers()
    for stage in stages:
        layers[stage].requires_grad_(False)
    return layers


LAYERS: dict[str, Callable[[], nn.Sequential]] = {
    "plain": six_layers,
    "dropout": lambda: with_layer(1, lambda: nn.Dropout(0.3)),
    "first_frozen": lambda: frozen(slice(0, 2)),
    "last_frozen": lambda: frozen(slice(2, 6)),
    "first_mixes": lambda: with_layer(1, Centred),
    "last_mixes": lambda: with_layer(3, Centred),
    "first_backward": lambda: with_layer(0, lambda: ByRows(FEATURES, WIDTH)),
    "last_backward": lambda: with_layer(2, lambda: ByRows(WIDTH, WIDTH)),
    "norm": lambda: with_layer(1, lambda: nn.BatchNorm1d(WIDTH)),
    "noise": lambda: with_layer(1, Noise),
}


class AcrossRows(nn.Module):
    """A block that looks across the rows."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.block(x, mask) - x.mean(0)


def fit(root: Path, name: str, verify: bool, processes: str = "per_stage") -> Any:
    """The weights of this process, and the state of its generator, after a fit; or its error."""
    torch.manual_seed(0)
    model = Classifier(layers=LAYERS[name]())
    balance = {"per_stage": [2, 4], "per_node": [1, 2, 2, 1]}[processes]
    made = trainer_over(root, processes, balance, {"verify": verify}, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = said(lambda: made.fit(model, datamodule=Data(shuffle=True)))
    own = {n: p.detach() for n, p in model.state_dict().items() if not p.is_meta}
    reported = [str(each.message) for each in caught if "verified: " in str(each.message)]
    return error, {"weights": own, "random": torch.rand(())}, reported


@pytest.mark.parametrize(
    "name, processes",
    [
        ("plain", "per_stage"),
        ("dropout", "per_stage"),
        ("dropout", "per_node"),
        ("first_frozen", "per_stage"),
        ("last_frozen", "per_stage"),
    ],
)
def test_fit_is_the_same(tmp_path: Path, two_ranks: Pool, name: str, processes: str) -> None:
    verified, plain = (
        two_ranks.run(fit, tmp_path, name, verify, processes) for verify in (True, False)
    )

    for (error, found, reported), (_, expected, _) in zip(verified, plain, strict=True):
        assert error == "none"
        assert not reported, "no difference"
        assert_equal(list(found["weights"].values()), list(expected["weights"].values()))
        assert_equal(found["random"], expected["random"])


@pytest.mark.parametrize(
    "name, value",
    [
        ("first_mixes", "the output of layer 1 ('1', Centred, stage 0, cpu of rank 0) differs"),
        ("last_mixes", "the output of layer 3 ('3', Centred, stage 1, cpu of rank 1) differs"),
        ("first_backward", "the gradient of '0."),
        ("last_backward", "the gradient of '2."),
    ],
)
def test_fault_ends_the_fit_in_all_processes(
    tmp_path: Path, two_ranks: Pool, name: str, value: str
) -> None:
    for error, _, _ in two_ranks.run(fit, tmp_path, name, True):
        assert error.startswith("RuntimeError | a pipeline must compute what its layers compute")
        assert value in error


@pytest.mark.parametrize(
    "name, reason",
    [("norm", "layer 1 has a BatchNorm1d"), ("noise", "a layer draws random numbers")],
)
def test_known_reason_is_a_warning(tmp_path: Path, two_ranks: Pool, name: str, reason: str) -> None:
    (error, _, [reported]), (other, _, _) = two_ranks.run(fit, tmp_path, name, True)

    assert (error, other) == ("none", "none")
    assert reason in reported


def fit_blocks(root: Path, mixing: int | None, verify: bool) -> tuple[str, dict[str, Tensor]]:
    """The error and the weights of this process after a fit of a loop over blocks."""
    torch.manual_seed(0)
    model: Any = LanguageModel("looped")
    if mixing is not None:
        model.net.blocks = nn.ModuleList(
            AcrossRows(block) if k == mixing else block for k, block in enumerate(model.net.blocks)
        )
    options = {"verify": verify, "module": "net.blocks"}
    made = trainer_over(root, "per_stage", [2, 2], options, max_epochs=1)
    error = said(lambda: made.fit(model, datamodule=Text()))
    return error, {name: x for name, x in model.state_dict().items() if not x.is_meta}


def test_loop_over_blocks_is_the_same(tmp_path: Path, two_ranks: Pool) -> None:
    verified, plain = (two_ranks.run(fit_blocks, tmp_path, None, each) for each in (True, False))

    for (error, found), (_, expected) in zip(verified, plain, strict=True):
        assert error == "none"
        assert_equal(list(found.values()), list(expected.values()))


@pytest.mark.parametrize("mixing", [1, 2])
def test_stage_whose_block_mixes_rows_is_named(
    tmp_path: Path, two_ranks: Pool, mixing: int
) -> None:
    for error, _ in two_ranks.run(fit_blocks, tmp_path, mixing, True):
        assert error.startswith("RuntimeError | a pipeline must compute what its layers compute")
        assert "the output" in error


class Longest(nn.Module):
    """Reads how long the longest row of its batch is."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, lengths = batch
        return x / x.size(1), lengths


class Each(nn.Module):
    """Treats each row by itself, whatever its padding."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, lengths = batch
        return x.sin() + 1, lengths


def verify_padded(longest: int | None) -> str:
    """What a pipeline without a Trainer says about padded rows."""
    layers = nn.Sequential(*(Longest() if k == longest else Each() for k in range(4)))
    sequences = PaddedSequences(1, trim=[0], pad_outputs=[0])
    pipeline = GPipe(
        layers,
        [1, 1, 1, 1],
        devices=["cpu"] * 4,
        chunks=3,
        microbatching=sequences,
        owners=[0, 0, 1, 1],
        group=group_of(2),
    )
    x = torch.linspace(0, 1, 30).double().reshape(6, 5)
    found = verify(pipeline, (x, torch.tensor([1, 5, 2, 4, 3, 2])))
    pipeline.close()
    return str(found)


def test_padded_rows_without_a_trainer(two_ranks: Pool) -> None:
    for found in two_ranks.run(verify_padded, None):
        assert found.startswith("verified: ")
    for found in two_ranks.run(verify_padded, 1):
        assert "between a plain run and one in 3 micro-batches, the output" in found

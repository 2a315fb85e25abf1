"""Promise: GPipe takes a whole model as it is, and the balance says what is counted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.models import assert_same
from tests.support.pipes import every_mode
from tests.support.traced import assert_same_run, images
from tests.support.traced_models import ResNet, UNet, VisionTransformer

CPU = torch.device("cpu")


class Stack(nn.Module):
    """A head after layers in one nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.mean((2, 3))).tanh())


def partitions(pipeline: GPipe) -> list[str]:
    return [str(partition) for partition in pipeline.layout.partitions]


@every_mode
@pytest.mark.parametrize("balance", [[8, 9, 6], ["down2", "up1"], "parameters"], ids=str)
def test_unet_as_it_is(balance: object, mode: object) -> None:
    torch.manual_seed(0)
    plain = UNet()
    own = copy.deepcopy(plain)
    pipeline = GPipe(
        own,
        balance,  # type: ignore[arg-type]  # as drawn above
        devices=[CPU] * 3,
        chunks=3,
        activation_checkpointing=mode,  # type: ignore[arg-type]  # as drawn
    )

    assert_same_run(pipeline, plain, images())
    assert list(pipeline.state_dict()) == list(plain.state_dict())
    pipeline.close()


def test_balance_that_counts_the_layers_of_the_heaviest_part() -> None:
    pipeline = GPipe(Stack(), [2, 4], chunks=3)

    assert partitions(pipeline) == ["layers 0..1", "layers 2..5"]
    pipeline.close()


def test_balance_that_counts_the_calls_of_the_model() -> None:
    pipeline = GPipe(Stack(), [2, 5], chunks=3)

    assert partitions(pipeline) == ["layers.0..1", "layers.2..head"]
    pipeline.close()


def test_balance_by_names_of_the_model() -> None:
    pipeline = GPipe(Stack(), ["layers.3", "head"], chunks=3)

    assert partitions(pipeline) == ["layers.0..2", "layers.3..5", "head"]
    pipeline.close()


def test_copy_of_a_pipeline_runs_by_itself() -> None:
    torch.manual_seed(0)
    plain = VisionTransformer()
    pipeline = GPipe(copy.deepcopy(plain), "parameters", devices=[CPU] * 3, chunks=3)
    pipeline(images())

    twin = copy.deepcopy(pipeline)
    pipeline.get_parameter("head.weight").data.zero_()

    assert_same_run(twin, plain, images())
    assert twin.timeline is not pipeline.timeline
    for each in (pipeline, twin):
        each.close()


def test_batch_norms_count_a_mini_batch_once() -> None:
    torch.manual_seed(0)
    plain = ResNet()
    pipeline = GPipe(copy.deepcopy(plain), "parameters", devices=[CPU] * 2, chunks=3)
    pipeline(images())
    plain(images())

    first = "layer1.0.bn1"
    assert_same(
        dict(pipeline.get_submodule(first).named_buffers()),
        dict(plain.get_submodule(first).named_buffers()),
    )
    pipeline.close()


def test_loss_within_a_forward() -> None:
    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    pipeline = GPipe(Model(), "parameters", devices=[CPU] * 2, chunks=3)

    with pytest.raises(ValueError, match="must have a row per sample"):
        pipeline(images())
    pipeline.close()


class WithLoss(nn.Module):
    """Computes its loss in forward, as models of language do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, targets)


def test_loss_in_the_forward_of_a_model_needs_its_blocks_as_the_module() -> None:
    plain = WithLoss()
    x, targets = torch.rand(7, 3).double(), torch.arange(7) % 2
    whole = GPipe(copy.deepcopy(plain), [2, 3], chunks=3)
    with pytest.raises(
        ValueError, match=r"\(\), \(\), .* if module= is the path of the blocks in it"
    ):
        whole(x, targets)
    whole.close()

    blocks = GPipe(own := copy.deepcopy(plain), [2, 2], module="blocks", chunks=3)
    for model in (blocks, plain):
        model(x, targets)[1].backward()
    assert_same(blocks(x, targets), plain(x, targets))
    assert_same(*([p.grad for p in each.parameters()] for each in (own, plain)))
    blocks.close()

"""Nothing silent: layers with sharded parameters are refused by name.

FSDP2 (``fully_shard``) gives a layer its whole parameters when its forward begins. A pipeline had
put shadows of the shards in their place by then, so no gradient came back: all were None after the
first step, and the second one ended in an error about a loss term.

Here are also the tests of ``shards``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_gpipe import GPipe
from tests.support.lightning_modules import Classifier, Data
from tests.support.processes import said
from tests.support.ranks import Pool, group_of
from tests.support.trainers import trainer_over

W, LAYERS = 4, 4
TOKENS = 8


class Model(nn.Module):
    """An embedding, layers to pipeline, and a norm."""

    def __init__(self, kind: type[nn.Sequential] | type[nn.ModuleList] = nn.Sequential) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, W)
        layers = [nn.Linear(W, W) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers) if kind is nn.Sequential else nn.ModuleList(layers)
        self.norm = nn.LayerNorm(W)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            x = layer(x)
        return self.norm(x)


def in_list() -> Model:
    return Model(nn.ModuleList)


def mesh() -> DeviceMesh:
    """The two ranks of a test."""
    return DeviceMesh.from_group(group_of(2), "cpu")


def shard(*modules: nn.Module) -> None:
    for module in modules:
        fully_shard(module, mesh=mesh())  # type: ignore[call-overload, unused-ignore]  # 2.8's


def split(layer: nn.Module) -> None:
    parallelize_module(layer, mesh(), ColwiseParallel())


def piped(model: nn.Module, module: str | None = "layers", **options: Any) -> GPipe:
    given = {"devices": ["cpu", "cpu"], "chunks": 3, **options}
    return GPipe(model, [2, 2] if module else "parameters", module=module, **given)


def construct(build: Callable[[], Model], change: Callable[[nn.Module], None], path: Any) -> str:
    """The error of a pipeline of a model whose second and last layers are changed before."""
    model = build()
    change(model.layers[1])
    change(model.layers[3])
    return said(lambda: piped(model, path, devices=["cpu", "cpu"]))


BUILDS = pytest.mark.parametrize(
    "build, path",
    [(Model, "layers"), (in_list, "layers"), (Model, None)],
    ids=["sequential", "list", "traced"],
)
FOUND = "layers.1.weight, layers.1.bias, layers.3.weight, layers.3.bias"


@pytest.mark.parametrize("change", [shard, split])
@BUILDS
def test_sharded_layers_are_refused_when_the_pipeline_is_made(
    two_ranks: Pool, build: Any, path: str | None, change: Any
) -> None:
    errors = two_ranks.run(construct, build, change, path)

    expected = (
        "TypeError | parameters of layers in a pipeline must be whole: got the shards (DTensor) "
        f"{FOUND}, which would get no gradients. Leave fully_shard and parallelize_module out. "
        "GPipeStrategy(replicas=...) trains several pipelines together; fully_shard(pipeline), of "
        "a GPipe as a whole, shards what it has between its calls. In configure_model(), with "
        "GPipeStrategy(sharding='parameters'), fully_shard may divide layers over "
        "self.device_mesh['data_parallel'], and with GPipeStrategy(tensor_parallel=...), "
        "parallelize_module over self.device_mesh['tensor_parallel']."
    )
    assert errors == [expected] * 2


def first_call(build: Callable[[], Model], path: str | None) -> list[str]:
    """The errors of a pipeline whose second and last layers are sharded after it is made."""
    model = build()
    with closing(piped(model, path)) as pipeline:
        shard(model.layers[1], model.layers[3])
        layer: Any = model.layers[1]
        layer.unshard()  # as FSDP2 leaves a layer that ran by itself
        return [said(lambda: pipeline(tokens())) for _ in range(2)]


@BUILDS
def test_layers_sharded_later_are_refused_in_the_first_forward(
    two_ranks: Pool, build: Any, path: str | None
) -> None:
    (errors, _) = two_ranks.run(first_call, build, path)

    title = "layer 1" if build is Model and path else "layers.1"
    for error in errors:
        assert error.startswith("RuntimeError | parameters of layers in a pipeline must be whole")
        assert f"(DTensor) {title}.weight, {title}.bias, " in error


def construct_on_threads() -> str:
    """The error of a pipeline on two threads, of layers that a strategy would divide."""
    model = Model()
    named = DeviceMesh.from_group(group_of(2), "cpu", mesh_dim_names=("tensor_parallel",))
    parallelize_module(model.layers[1], named, ColwiseParallel(output_layouts=Replicate()))
    error = said(lambda: piped(model))
    with closing(piped(model, threads=False)) as pipeline:
        torch.testing.assert_close(pipeline(tokens()), model(tokens()))
    return error


def test_layers_divided_among_processes_are_refused_on_threads(two_ranks: Pool) -> None:
    for error in two_ranks.run(construct_on_threads):
        assert error.startswith("TypeError | layers that parallelize_module divides must run in")


class Sharded(Classifier):
    """Shards a layer among stages, which are no replicas."""

    def configure_model(self) -> None:
        shard(self.layers[2])


def fit(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {}, max_steps=1)
    return said(lambda: made.fit(Sharded(), Data()))


def test_strategy_refuses_sharded_layers(tmp_path: Path, two_ranks: Pool) -> None:
    for error in two_ranks.run(fit, tmp_path):
        assert error.startswith("ValueError | fully_shard in configure_model may divide new layers")
        assert "got mesh=DeviceMesh(" in error and " of layers.2. Write fully_shard(" in error


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TOKENS, (7, 2), generator=generator)


def trained(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The parameters after three steps on batches that are the same in all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        forward(tokens(seed)).sin().mean().backward()
        optimizer.step()
    whole = (
        (name, p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in model.named_parameters()
    )
    return {name: p.detach().clone() for name, p in whole}


def train(build: Callable[[], Model], where: str) -> tuple[dict[str, Tensor], set[str]]:
    """The parameters of a model that is sharded somewhere, and the names of the shards."""
    warnings.simplefilter("ignore")  # of FSDP's own hooks
    model = build()
    with closing(piped(model)) as pipeline:
        shard(*([pipeline] if where == "pipeline" else [model.embed, model.norm]))
        sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return trained(model, pipeline), sharded


@pytest.mark.parametrize("where", ["pipeline", "around"])
@pytest.mark.parametrize("build", [Model, in_list], ids=["sequential", "list"])
def test_shards_of_the_whole_pipeline_or_around_it_train(
    two_ranks: Pool, build: Any, where: str
) -> None:
    with torch.random.fork_rng(devices=[]):
        plain = build()
        expected = trained(plain, plain)

    for found, sharded in two_ranks.run(train, build, where):
        around = {"embed.weight", "norm.weight", "norm.bias"}
        assert sharded == (set(expected) if where == "pipeline" else around)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

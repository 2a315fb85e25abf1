"""torch.compile within a LightningModule."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.compilation import can_compile, counting, has_dynamo
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    assert_same_weights,
    fitted,
    six_layers,
)

pytestmark = [
    pytest.mark.skipif(not has_dynamo(), reason="needs torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile looks
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]


class Body(nn.Module):
    """Runs its layers as a whole, or one by one."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.layers = six_layers()
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        if not self.loop:
            return self.layers(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x.sin()


class Compiled(Classifier):
    """A module that is compiled, with the layers to pipeline within it."""

    def __init__(self, loop: bool = False, compiled: bool = True) -> None:
        super().__init__(layers=nn.Sequential())
        del self.layers
        self.body = Body(loop).double()
        if compiled:
            self.body.compile(backend=counting([]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_compiled_module_around_the_pipeline(tmp_path: Path) -> None:
    """Once Dynamo crashed in the engine."""
    plain = fitted(tmp_path, build=lambda: Compiled(compiled=False))
    strategy = GPipeStrategy([2, 4], chunks=3)

    pipelined = fitted(tmp_path, strategy, build=Compiled, devices=2)

    assert_same_weights(pipelined, plain)


def test_compiled_loop_goes_around_the_pipeline(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 4], chunks=3)
    options: dict[str, Any] = {"devices": 2, "num_sanity_val_steps": 0}

    with pytest.raises(RuntimeError, match=r"training_step must call Compiled.body.layers"):
        fitted(tmp_path, strategy, build=lambda: Compiled(loop=True), **options)


# GPipeStrategy(compile=...): the layers are compiled, each kind once.

needs_modes = pytest.mark.skipif(not can_compile(), reason="needs modes that it may ignore")


class Keys(L.Callback):
    """Notes the keys of the state dict, and the graphs so far, after each epoch."""

    def __init__(self, graphs: list[int]) -> None:
        self.graphs, self.counts, self.keys = graphs, list[int](), list[str]()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.keys = list(pl_module.state_dict())
        self.counts.append(len(self.graphs))


def compiled_fit(
    root: Path, build: Any = Classifier, balance: Any = (2, 4), **options: Any
) -> tuple[L.Trainer, Keys, list[int]]:
    """A fit of three epochs without evaluations, with micro-batches of 3 and of 2 rows."""
    graphs: list[int] = []
    strategy = GPipeStrategy(
        list(balance), chunks=3, compile={"backend": counting(graphs)}, **options
    )
    keys = Keys(graphs)
    made = fitted(root, strategy, build=build, devices=2, callbacks=[keys], limit_val_batches=0)
    return made, keys, graphs


@needs_modes
@pytest.mark.parametrize("mode", ["never", "except_last"])
def test_compiled_layers_train_as_plain_ones(tmp_path: Path, mode: Any) -> None:
    plain = fitted(tmp_path)

    made, keys, graphs = compiled_fit(tmp_path, activation_checkpointing=mode)

    assert_same_weights(made, plain)
    assert graphs, "layers of PyTorch's own classes are not compiled by layer.compile()"
    assert keys.keys == list(plain.lightning_module.state_dict())
    assert not [m for m in made.lightning_module.modules() if m._compiled_call_impl is not None]


@needs_modes
def test_micro_batches_of_other_sizes_compile_nothing_again(tmp_path: Path) -> None:
    _, keys, _ = compiled_fit(tmp_path)

    first, *later = keys.counts
    assert first > 0
    assert later == [first, first]


@needs_modes
@pytest.mark.parametrize("threads", [True, "auto"])
def test_functions_have_one_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    """Threads that search several at once miss some, and once compiled them again in mid-fit."""
    functions: list[Any] = []
    compile = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        functions.append(function)
        return compile(function, **options)

    monkeypatch.setattr(torch, "compile", counted)

    *_, graphs = compiled_fit(tmp_path, threads=threads)

    assert len(graphs) == len(functions)


class Deep(Classifier):
    """Many layers: all of one kind, or each of its own."""

    def __init__(self, depth: int, alike: bool) -> None:
        widths = [WIDTH] * depth if alike else [WIDTH + k for k in range(1, depth)] + [WIDTH]
        linear = [nn.Linear(a, b) for a, b in zip([WIDTH, *widths], widths, strict=False)]
        super().__init__(layers=nn.Sequential(nn.Linear(FEATURES, WIDTH), *linear).double())


@needs_modes
def test_layers_that_are_alike_are_compiled_once(tmp_path: Path) -> None:
    *_, few = compiled_fit(tmp_path, lambda: Deep(2, alike=True), [1, 2])
    *_, many = compiled_fit(tmp_path, lambda: Deep(5, alike=True), [3, 3])

    assert len(many) == len(few)


@needs_modes
def test_more_kinds_of_layers_than_a_function_has_variants(tmp_path: Path) -> None:
    """The compiler gives up a function that needs more than eight variants."""
    build = lambda: Deep(11, alike=False)  # noqa: E731  # one line for a model

    made, keys, graphs = compiled_fit(tmp_path, build, [6, 6], activation_checkpointing="never")

    assert len(graphs) >= 12
    assert keys.counts[0] == keys.counts[-1]
    assert_same_weights(made, fitted(tmp_path, build=build))


class Blocks(Classifier):
    """A loop over an nn.ModuleList."""

    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential())
        del self.layers
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.first = nn.Linear(FEATURES, WIDTH).double()
        self.blocks = nn.ModuleList(layers).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@needs_modes
def test_compiled_blocks_of_a_loop(tmp_path: Path) -> None:
    made, keys, graphs = compiled_fit(tmp_path, Blocks, [2, 2])

    assert_same_weights(made, fitted(tmp_path, build=Blocks))
    assert graphs
    assert len(set(keys.counts)) == 1
    assert not [m for m in made.lightning_module.modules() if m._compiled_call_impl is not None]


class Normed(Classifier):
    """Has a batch norm and a dropout in compiled layers."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH))
        second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        super().__init__(layers=nn.Sequential(first, second).double())


@needs_modes
def test_statistics_of_compiled_batch_norms(tmp_path: Path) -> None:
    made, _, _ = compiled_fit(tmp_path, Normed, [1, 1])

    strategy = GPipeStrategy([1, 1], chunks=3)
    assert_same_weights(made, fitted(tmp_path, strategy, build=Normed, devices=2))


def test_setup_says_what_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compiled_fit(tmp_path)

    assert "GPipe compiles 6 layers of 3 kinds with torch.compile, backend backend" in caplog.text


@needs_modes
def test_fit_resumes_from_a_checkpoint_of_compiled_layers(tmp_path: Path) -> None:
    made, _, _ = compiled_fit(tmp_path)
    made.save_checkpoint(tmp_path / "compiled.ckpt")

    resumed = fitted(tmp_path, ckpt_path=tmp_path / "compiled.ckpt", max_epochs=4)

    assert_same_weights(resumed, fitted(tmp_path, max_epochs=4))


@pytest.mark.parametrize(
    "given, message",
    [
        (1, "compile must be True, False or a dict of options"),
        ({"modes": "default"}, r"compile takes 'backend'.*got \['modes'\]"),
        ({"mode": "reduce-overhead"}, "CUDA graphs, which belong to one thread"),
        ({"mode": "max-autotune"}, "'max-autotune-no-cudagraphs'"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
    ],
)
def test_wrong_options(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GPipeStrategy(compile=given)


class Traced(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential())
        del self.layers
        self.body = Body(loop=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_traced_module_is_refused(tmp_path: Path) -> None:
    strategy = GPipeStrategy("parameters", module="body", compile=True)

    with pytest.raises(ValueError, match=r"Traced\.body, whose forward is traced"):
        fitted(tmp_path, strategy, build=Traced, devices=2)

"""A model gets the weights in a folder; what runs as a pipeline then is the plain model.

Here are also the tests of ``stored``.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.frontends.pretrained import (
    load_pretrained,
    parameters_on_meta,
    tensors_in,
)
from lightning_gpipe.core.frontends.stored import StoredTensor

CPU = ["cpu", "cpu"]
WIDTH = 8


class Block(nn.Module):
    """As in a library of models: a bare weight, and a buffer that no file has."""

    frequencies: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("frequencies", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.scale + self.shift).sin() * self.frequencies


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers: Any = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Headed(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.model = Base()
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.model.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.model(ids))


def saved(model: nn.Module, path: Path, *without: str) -> Path:
    """One file, with tied parameters under the first of their names."""
    state = {name: value for name, value in model.state_dict().items() if name not in without}
    named = {value.data_ptr(): name for name, value in reversed(state.items())}
    save_file({name: state[name] for name in named.values()}, path / "model.safetensors")
    return path


def without_memory(build: Callable[[], Any] = Headed) -> Any:
    with parameters_on_meta():
        return build()


def ids() -> Tensor:
    return torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(1))


def test_pipeline_is_the_plain_model(tmp_path: Path) -> None:
    plain = Headed()
    model = without_memory()

    load_pretrained(model, saved(plain, tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    pipeline = GPipe(model, [1, 3], module="model.layers", devices=CPU, chunks=3)

    output, expected = pipeline(ids()), plain(ids())
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert model.head.weight is model.model.embedding.weight


def test_one_tensor_of_the_files_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[int, int] = {}
    most = 0
    read = StoredTensor.read

    def counted(stored: StoredTensor) -> Tensor:
        nonlocal most
        tensor = read(stored)
        key = len(alive)
        alive[key] = tensor.nbytes
        weakref.finalize(tensor, alive.__setitem__, key, 0)
        most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(StoredTensor, "read", counted)
    plain = Headed()
    model = without_memory()
    load_pretrained(model, saved(plain, tmp_path))
    gc.disable()
    try:
        GPipe(model, [1, 3], module="model.layers", devices=CPU)
    finally:
        gc.enable()

    assert len(alive) == len(plain.state_dict()) - 1, "each is read once, the tied one too"
    assert most == plain.head.weight.nbytes, "the largest"


def test_parameters_do_not_hold_the_file(tmp_path: Path) -> None:
    model = without_memory()
    load_pretrained(model, saved(Headed(), tmp_path))
    GPipe(model, [1, 3], module="model.layers", devices=CPU)

    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_whole_module_on_meta(tmp_path: Path) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)]
    plain = nn.Sequential(*layers)
    plain(torch.randn(9, WIDTH))  # statistics other than the first
    with torch.device("meta"):
        model = copy.deepcopy(plain).to("meta")

    load_pretrained(model, saved(plain, tmp_path))
    pipeline = GPipe(model, [2, 1], devices=CPU)

    assert pipeline.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(pipeline.state_dict()[name], value), name


def test_traced_model(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.token = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.enter(x).relu() + x * self.token)

    plain = Residual()
    model = without_memory(Residual)

    load_pretrained(model, saved(plain, tmp_path))
    pipeline = GPipe(model, ["leave"], devices=CPU, chunks=2)

    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(pipeline(x), plain(x))


def test_model_keeps_its_type(tmp_path: Path) -> None:
    plain = Headed()
    model = without_memory().to(torch.bfloat16)

    load_pretrained(model, saved(plain, tmp_path))
    GPipe(model, [1, 3], module="model.layers", devices=CPU)

    assert model.head.weight.dtype is torch.bfloat16
    assert torch.equal(model.head.weight, plain.head.weight.to(torch.bfloat16))


def test_copy_of_a_model_that_waits_for_its_weights(tmp_path: Path) -> None:
    plain = Headed()
    model = without_memory()
    load_pretrained(model, saved(plain, tmp_path))

    copied = copy.deepcopy(model)
    GPipe(copied, [1, 3], module="model.layers", devices=CPU)

    torch.testing.assert_close(copied(ids()), plain(ids()))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_pipeline_with_memory(tmp_path: Path) -> None:
    plain = Headed()
    model = Headed()
    pipeline = GPipe(model, [1, 3], module="model.layers", devices=CPU)
    parameters = list(model.parameters())

    load_pretrained(pipeline, saved(plain, tmp_path))

    torch.testing.assert_close(pipeline(ids()), plain(ids()))
    assert all(one is two for one, two in zip(parameters, model.parameters(), strict=True))


# Names.


def test_model_with_a_head_from_its_base(tmp_path: Path) -> None:
    base, model = Base(), Headed(tied=False)

    load_pretrained(model, saved(base, tmp_path), missing=["head.*"])

    torch.testing.assert_close(model.model(ids()), base(ids()))


def test_base_from_a_model_with_a_head(tmp_path: Path) -> None:
    whole, model = Headed(tied=False), Base()

    load_pretrained(model, saved(whole, tmp_path), unexpected=["head.weight"])

    torch.testing.assert_close(model(ids()), whole.model(ids()))


def test_tied_parameter_under_its_other_name(tmp_path: Path) -> None:
    plain, model = Headed(), without_memory()

    load_pretrained(model, saved(plain, tmp_path, "model.embedding.weight"))
    GPipe(model, [1, 3], module="model.layers", devices=CPU)

    torch.testing.assert_close(model(ids()), plain(ids()))


def test_missing_module_initialises_itself(tmp_path: Path) -> None:
    model = without_memory(lambda: Headed(tied=False))

    load_pretrained(model, saved(Base(), tmp_path), missing=["head.*"])
    GPipe(model, [1, 3], module="model.layers", devices=CPU)

    assert 0 < model.head.weight.abs().max() < WIDTH**-0.5


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    other = Headed(tied=False)
    other.model.layers.append(Block())
    other.model.layers[0].scale = nn.Parameter(torch.ones(3))
    other.model.layers[1].shift = torch.ones(WIDTH, dtype=torch.int64)
    model = without_memory(lambda: Headed(tied=False))

    with pytest.raises(ValueError) as raised:
        load_pretrained(model, saved(other, tmp_path, "head.weight"))

    for part in (
        "missing in the files: head.weight; unexpected in the files: model.layers.4.",
        "model.layers.0.scale is (8,), torch.float32 in the model, and in the files (3,), floating",
        "model.layers.1.shift is (8,), torch.float32 in the model, and in the files (8,), integer",
        "missing=[...]",
    ):
        assert part in str(raised.value)


def test_buffer_that_nothing_computes(tmp_path: Path) -> None:
    folder = saved(Headed(), tmp_path)
    with torch.device("meta"):
        model = Headed()

    with pytest.raises(TypeError, match=r"got Block without.*parameters_on_meta\(\)"):
        load_pretrained(model, folder)


# What is added afterwards.


class Adapter(nn.Module):
    """A layer in the place of another, which it adds to."""

    def __init__(self, base: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.base = base
        self.added = nn.Linear(WIDTH, WIDTH, device=device)
        if not self.added.weight.is_meta:
            nn.init.zeros_(self.added.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.added(x)


def adapted(path: Path, device: str) -> Any:
    model = without_memory()
    load_pretrained(model, path)
    for block in model.model.layers:
        block.linear = Adapter(block.linear, torch.device(device))
    return model


def test_adapters_that_are_added_rename_layers(tmp_path: Path) -> None:
    plain = Headed()

    model = adapted(saved(plain, tmp_path), "cpu")
    GPipe(model, [1, 3], module="model.layers", devices=CPU)

    for mine, its in zip(model.model.layers, plain.model.layers, strict=True):
        assert torch.equal(mine.linear.base.weight, its.linear.weight)
        assert mine.linear.added.weight.abs().max() == 0


def test_adapters_on_meta(tmp_path: Path) -> None:
    """reset_parameters() of their layers would give them other values than their library did."""
    model = adapted(saved(Headed(), tmp_path), "meta")

    with pytest.raises(ValueError, match=r"got model\.layers\.0\.linear\.added\.weight, .* 2 more"):
        GPipe(model, [1, 3], module="model.layers", devices=CPU)


def shards(folder: Path) -> Path:
    """Two files and their index."""
    save_file(
        {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}, folder / "1.safetensors"
    )
    save_file({"c": torch.full((1, 2), 5.0, dtype=torch.bfloat16)}, folder / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def test_shards_and_their_index(tmp_path: Path) -> None:
    found = tensors_in(shards(tmp_path))

    assert {name: (each.shape, each.floating) for name, each in found.items()} == {
        "a": ((2,), True),
        "b": ((3,), False),
        "c": ((1, 2), True),
    }
    assert found["c"].read().tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("path", ["", "model.safetensors"])
def test_one_file_and_its_folder(tmp_path: Path, path: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    assert list(tensors_in(tmp_path / path)) == ["a"]


def test_files_that_lack_what_the_index_lists(tmp_path: Path) -> None:
    save_file({"c": torch.ones(2)}, shards(tmp_path) / "1.safetensors")

    with pytest.raises(ValueError, match="must have the tensors that its index lists.*for a, b"):
        tensors_in(tmp_path)


def test_folder_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(FileNotFoundError, match=r"one with pytorch_model\.bin\..*save_pretrained"):
        tensors_in(tmp_path)


def test_name_of_a_model_of_a_hub() -> None:
    with pytest.raises(FileNotFoundError, match="some/model, nothing there.*snapshot_download"):
        tensors_in(Path("some/model"))


def test_no_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(ImportError, match="Run pip install safetensors."):
        tensors_in(tmp_path)


# Models whose parameters are on the meta device.


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def test_buffers_have_their_values() -> None:
    with parameters_on_meta():
        module = nn.Sequential(Rotary(), nn.BatchNorm1d(2))

    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.get_buffer("0.frequencies").tolist() == [0, 1, 2]
    assert module.get_buffer("1.running_var").tolist() == [1, 1]


def test_frozen_parameters_are_frozen() -> None:
    with parameters_on_meta():
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(2), requires_grad=False)

    assert not module.weight.requires_grad


def test_parameters_tied_before_and_after_a_module_has_them() -> None:
    with parameters_on_meta():
        one, two, three = (nn.Linear(2, 2, bias=False) for _ in range(3))
        one.weight = two.weight = nn.Parameter(torch.ones(2, 2))
        three.weight = two.weight

    assert one.weight is two.weight
    assert three.weight is two.weight


def test_parameters_of_other_classes_stay() -> None:
    class Packed(nn.Parameter):
        pass

    with parameters_on_meta():
        module = nn.Module()
        module.weight = Packed(torch.ones(2))

    assert type(module.weight) is Packed
    assert not module.weight.is_meta


def test_afterwards_and_on_other_threads() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        thread = Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join(60)
    built.append(nn.Linear(2, 2))

    assert [module.weight.is_meta for module in built] == [False, False]

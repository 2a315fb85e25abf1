"""Promise: a model runs as a pipeline as it is, and computes what it computes without one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, verify
from lightning_gpipe.core.faithful import Attributes, Journal, Manager
from tests.support.models import assert_same
from tests.support.pipes import every_mode

WIDTH = 4


def rows(n: int = 7) -> Tensor:
    return torch.linspace(-1, 1, n * WIDTH, dtype=torch.float64).view(n, WIDTH).sin()


class Residual(nn.Module):
    """Calls its children in any order, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x).relu()
        z = self.norm(self.middle(y)) * self.scale
        return self.up(z + y)


class Block(nn.Module):
    """Adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * mask


class Looped(nn.Module):
    """Loops over blocks, which all get a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.last(x)


class Classifier(nn.Module):
    """Something before and after a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(self.first(x))) * scale}


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual().double()


def same(pipeline: GPipe, model: nn.Module, plain: nn.Module, **arguments: Any) -> None:
    """Compare a step."""
    found, wanted = pipeline(rows(), **arguments), plain(rows(), **arguments)
    assert_same(found, wanted)
    for output in (found, wanted):
        logits = output["logits"] if isinstance(output, dict) else output
        logits.square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None, name
        assert_same(one.grad, other.grad)
    assert list(pipeline.state_dict()) == list(plain.state_dict())


@every_mode
@pytest.mark.parametrize("balance", [[1, 1, 2], ["middle", "up"], [4]], ids=str)
def test_model_of_any_kind(mode: Any, balance: Any) -> None:
    model = residual().eval()  # a batch norm in training normalises by micro-batch
    plain = deepcopy(model)

    pipeline = GPipe(model, balance, chunks=3, activation_checkpointing=mode)

    same(pipeline, model, plain)
    pipeline.close()


@every_mode
@pytest.mark.parametrize("kind", ["sequential", "traced", "list"])
def test_module_in_a_model(mode: Any, kind: str) -> None:
    torch.manual_seed(0)
    sequential = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    bodies = {"sequential": sequential, "traced": residual().eval(), "list": Looped()}
    model = Classifier(bodies[kind]).double()
    plain = deepcopy(model)
    path, balance = {
        "sequential": ("body", [1, 2]),
        "traced": ("body", [1, 3]),
        "list": ("body.blocks", [3, 2]),
    }[kind]

    pipeline = GPipe(model, balance, module=path, chunks=3, activation_checkpointing=mode)

    same(pipeline, model, plain, scale=2.0)
    pipeline.release()
    before = [set(vars(each)) for each in model.modules()]
    assert before == [set(vars(each)) for each in plain.modules()]
    pipeline.close()


def test_listing_has_the_names_of_modules() -> None:
    pipeline = GPipe(residual(), [1, 3])

    assert str(pipeline.layout).splitlines()[0] == "stage 0 | worker 0 | cpu | down"
    assert next(iter(pipeline.listing().columns[2].cells)) == "down"


def test_balance_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"got balance=\[2, 3\] \(sum 5\) for the 4 layers"):
        GPipe(residual(), [2, 3])
    with pytest.raises(ValueError, match="got 'left', and no unit of module is that"):
        GPipe(residual(), ["left"])


class Both(nn.Module):
    """Two stacks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for block in self.encoder:
            x = block(x, mask=mask)
        encoded = x
        for block in self.decoder:
            x = block(x, mask=encoded > 0)
        return self.last(x + encoded)


@every_mode
def test_several_modules_of_a_model(mode: Any) -> None:
    torch.manual_seed(0)
    model = Both().double()
    plain = deepcopy(model)
    pipeline = GPipe(
        model,
        [[1, 2], [2, 2]],
        module=["encoder", "decoder"],
        chunks=3,
        activation_checkpointing=mode,
    )
    seen: list[Any] = []
    handle = pipeline.observe(seen.append)

    same(pipeline, model, plain)
    handle.remove()
    pipeline(rows())

    assert len(seen) == 2
    assert [str(stage.partition) for stage in pipeline.stages] == [
        "encoder.0",
        "encoder.1..2",
        "decoder.0..1",
        "decoder.2..3",
    ]
    assert pipeline.listing().row_count == 4
    pipeline.close()


def test_several_modules_without_a_balance_for_each() -> None:
    with pytest.raises(ValueError, match="a list for each path in module: got a list of 1, "):
        GPipe(Both(), [[1, 2]], module=["encoder", "decoder"])


def test_several_modules_within_one_another() -> None:
    with pytest.raises(ValueError, match="within one another: got 'body' and 'body.blocks'"):
        GPipe(Classifier(Looped()), [[1, 1], [3, 2]], module=["body", "body.blocks"])


@pytest.mark.parametrize("kind", ["traced", "list"])
def test_model_that_is_verified(kind: str) -> None:
    torch.manual_seed(0)
    bodies = {"traced": residual().eval(), "list": Looped()}
    path, balance = {"traced": ("body", [1, 3]), "list": ("body.blocks", [3, 2])}[kind]
    model = Classifier(bodies[kind]).double()
    pipeline = GPipe(model, balance, module=path, chunks=3)

    parity = verify(pipeline, rows(), scale=2.0)

    parity.check()
    assert parity.difference is None
    assert parity.compared["gradients"]
    assert all(parameter.grad is None for parameter in model.parameters())
    pipeline.close()


@pytest.mark.parametrize("kind", ["traced", "list"])
def test_copy_is_a_pipeline_of_its_own(kind: str) -> None:
    torch.manual_seed(0)
    bodies = {"traced": residual().eval(), "list": Looped()}
    path, balance = {"traced": ("body", [1, 3]), "list": ("body.blocks", [3, 2])}[kind]
    model = Classifier(bodies[kind]).double()
    pipeline = GPipe(model, balance, module=path, chunks=3)
    pipeline(rows())

    copied = deepcopy(pipeline)
    seen: list[Any] = []
    copied.observe(seen.append)
    found = copied(rows())["logits"]
    found.sum().backward()

    assert_same(found, pipeline(rows())["logits"])
    assert len(seen) == 1
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in (copied, pipeline):
        each.close()


class Shifted(nn.Sequential):
    """Has a ``__call__`` of its own around that of nn.Module."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + 1


def test_model_with_a_call_of_its_own() -> None:
    """It was left out, without a word."""
    pipeline = GPipe(Shifted(nn.Linear(3, 3), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)

    with pytest.raises(TypeError, match="no __call__ of its own.*: got Shifted"):
        pipeline(torch.ones(4, 3))
    pipeline.close()


def test_check_within_a_check() -> None:
    """The outer check goes on when the inner one has ended, as of a verification in another."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    pipeline = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)
    runs: list[str] = []

    def checked(name: str) -> Manager:
        writes = [
            (Attributes(piped), "check", lambda *_: runs.append(name))
            for piped in pipeline.piped_modules
        ]
        return Journal().changed(writes)

    with checked("outer"):
        with checked("inner"):
            pipeline(torch.ones(4, 3))
        pipeline(torch.ones(4, 3))
    pipeline(torch.ones(4, 3))
    pipeline.close()

    assert runs == ["inner", "outer"]

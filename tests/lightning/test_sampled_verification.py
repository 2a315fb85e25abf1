"""Reported by default: a few rows of the first batch differ with and without the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy, Rows
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    six_layers,
    trainer,
)

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module"),
]


class Looped(nn.Module):
    """Blocks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Model(Classifier):
    """A :class:`Classifier` whose layers are :class:`Looped`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Looped().double()  # type: ignore[assignment]


def looped(**options: Any) -> dict[str, Any]:
    strategy = GPipeStrategy([2, 2], 3, module="layers.blocks", **options)
    return {"strategy": strategy, "devices": 2}


def stepped(**options: Any) -> dict[str, Any]:
    strategy = GPipeStrategy([2, 2, 2], 3, schedule="1f1b", **options)
    return {"strategy": strategy, "devices": 3}


class Centring(Model):
    """With a block that computes across rows."""

    def __init__(self) -> None:
        super().__init__()
        block = self.layers.get_submodule("blocks.1")
        block.register_forward_hook(lambda self, args, output: output - output.mean(0))


class Centred(Classifier):
    """With a layer that computes across rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(lambda self, args, output: output - output.mean(0))


class Normed(Classifier):
    """With a batch norm in the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(WIDTH).double()


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: parametrized(nn.Linear(WIDTH, WIDTH)),
    nn.RReLU,
]


def after(model: type[Classifier], norm: Callable[[], nn.Module]) -> Classifier:
    """The model after a layer whose results depend on the micro-batches, which is known."""
    built = model()
    if isinstance(built.layers, Looped):
        built.layers.blocks[0] = nn.Sequential(built.layers.blocks[0], norm().double())
    else:
        built.layers[1] = norm().double()
    return built


class CentredInEvaluation(Classifier):
    """With a layer that computes across rows when it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(
            lambda self, args, output: output if self.training else output - output.mean(0)
        )


class TimeFirst(nn.Module):
    """Returns two points in time, in dim 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, x + 1])


class InTime(Classifier):
    """Gets the layers' output with its rows in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[5] = TimeFirst()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(x)[-1])
        return result


class Routes(nn.Module):
    """Keeps its load, which a training step may log, and what is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}
        self.options = {"of": WIDTH}

    def forward(self, x: Tensor) -> Tensor:
        self.load = x.detach().mean(0)
        self.stats["spread"] = x.detach().std().item()
        self.width = x.shape[1]
        self.mask = torch.ones(self.width, self.width).tril()
        self._last = x.detach()
        return x + 0


class Counts(nn.Module):
    """Counts how often it has run."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0


class Entry(nn.Module):
    """Takes the entry of a batch in which rows are in dim 1."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] - batch["x"].mean(1, keepdim=True)


class Entries(Classifier):
    """Calls its layers with a dict."""

    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(Entry(), *six_layers()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers({"x": x[None]})[0])
        return result


class Carries(nn.Module):
    """Adds what it had for the rows before, as a recurrent layer that keeps its state does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept, self.kept = self.kept, x.detach()
        return x if kept is None else x + kept[: len(x)]


class Averages(nn.Module):
    """Has a moving average of all rows, as a codebook does."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
        return x + 0


class Loaded(Classifier):
    """Its last layer returns values that are not per row, beside those that are."""

    def __init__(self, value: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers[5].register_forward_hook(lambda self, args, output: (output, value(output)))

    def forward(self, x: Tensor) -> Tensor:
        output, value = self.layers(x)
        result: Tensor = self.head(output + value.mean())
        return result


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def by_entry(**options: Any) -> dict[str, Any]:
    options["microbatching"] = Rows(dim={"x": 1}, output_dim=1)
    return {"strategy": GPipeStrategy([3, 4], 3, **options), "devices": 2}


def plainly(**options: Any) -> dict[str, Any]:
    return {"strategy": GPipeStrategy([3, 3], 3, **options), "devices": 2}


def within(layer: Callable[[], nn.Module]) -> Classifier:
    """With a layer in the place of the first activation."""
    model = Classifier()
    model.layers[1] = layer().double()
    return model


class Scaled(nn.Module):
    """Computes something else while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * (1 if type(x) is Tensor else 2))


class Traced(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Scaled().double()  # type: ignore[assignment]


@pytest.mark.parametrize("verify", ["sample", True])
def test_forward_without_the_pipeline_is_what_is_compared(tmp_path: Path, verify: Any) -> None:
    """Once the pipeline was compared with itself, in Trainers only."""
    strategy = GPipeStrategy([1, 1], 3, module="layers", verify=verify)

    with pytest.raises(RuntimeError, match="what a pipeline runs of a forward must compute what"):
        trainer(tmp_path, strategy, devices=2).fit(Traced(), Data())


class Summed(Classifier):
    """With a loss that is a sum over rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")


@pytest.mark.parametrize(
    "model, arguments, message",
    [
        (Centring, looped, "must compute what its layers compute"),
        (Centred, plainly, r"the output of layer 3 \('3', Tanh, stage 1, cpu\) differs"),
        (Entries, by_entry, "a plain run and one in 2 micro-batches, the output differs"),
        (partial(within, Carries), plainly, "the output of layer 1"),
        (partial(within, Averages), plainly, "the buffer '1.average' of layer 1"),
        (Centred, stepped, r"the output of layer 3 \('3', Tanh, stage 1, cpu\) differs"),
        (Summed, stepped, "It is the sum of theirs"),
    ],
    ids=[
        "in a block",
        "in a layer",
        "by entry",
        "carried",
        "averaged",
        "in a layer, 1F1B",
        "a sum",
    ],
)
def test_difference_ends_the_fit_before_the_first_step(
    tmp_path: Path, model: Callable[[], Classifier], arguments: Any, message: str
) -> None:
    """An nn.Sequential was compared for no loss of the batch: it trained without a word."""
    built = model()
    before = {name: value.clone() for name, value in built.state_dict().items()}

    with pytest.raises(RuntimeError, match=message) as error:
        trainer(tmp_path, **arguments()).fit(built, Data())

    assert "write verify=False" in error.value.__notes__[-1]
    torch.testing.assert_close(dict(built.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in built.parameters())
    trainer(tmp_path, **arguments(verify=False), max_steps=1).fit(model(), Data())


@pytest.mark.parametrize("norm", NORMS, ids=["batch", "a hook", "a parametrization", "RReLU"])
@pytest.mark.parametrize(
    "model, arguments, message",
    [
        (Centring, looped, "must compute what its layers compute"),
        (Centred, plainly, r"the output of layer 3 \('3', Tanh, stage 1, cpu\) differs"),
        (Centred, stepped, r"the output of layer 3 \('3', Tanh, stage 1, cpu\) differs"),
        (Summed, stepped, "It is the sum of theirs"),
    ],
    ids=["in a block", "in a layer", "in a layer, 1F1B", "a sum"],
)
def test_layer_with_a_known_reason_does_not_hide_others(
    tmp_path: Path,
    model: type[Classifier],
    arguments: Any,
    message: str,
    norm: Callable[[], nn.Module],
) -> None:
    """Once nothing after the first batch norm was compared, which is most of a U-Net."""
    built = after(model, norm)

    with pytest.raises(RuntimeError, match=message):
        trainer(tmp_path, limit_val_batches=0, **arguments()).fit(built, Data())

    assert all(module.training for module in built.modules())
    trainer(tmp_path, **arguments(verify=False), max_steps=1).fit(after(model, norm), Data())


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("verify", ["sample", True])
def test_layer_that_computes_across_rows_in_evaluation(
    tmp_path: Path, verb: str, verify: Any
) -> None:
    """Nothing was compared but the first training step."""
    made = trainer(tmp_path, **plainly(verify=verify))

    with pytest.raises(RuntimeError, match=r"the output of layer 3 \('3', Tanh, stage 1, cpu\)"):
        getattr(made, verb)(CentredInEvaluation(), Data())

    getattr(trainer(tmp_path, **plainly(verify=False)), verb)(CentredInEvaluation(), Data())


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_evaluation_with_a_loss_for_each_micro_batch(tmp_path: Path, size: int) -> None:
    """In training each micro-batch is one; the outputs in evaluation were put together wrongly."""

    def strategy() -> dict[str, Any]:
        return {"strategy": GPipeStrategy([2, 2, 2], 2, schedule="1f1b"), "devices": 3}

    loader = DataLoader(rows(size, seed=2), batch_size=size)
    trainer(tmp_path, max_steps=1, limit_val_batches=0, **strategy()).fit(InTime(), Data())

    with pytest.raises(RuntimeError, match=r"the output of layer 5 .* of shape .* instead of"):
        trainer(tmp_path, **strategy()).predict(InTime(), loader)


@pytest.mark.parametrize("model, arguments", [(Centred, plainly), (Centring, looped)])
def test_evaluation_computes_no_gradients(
    tmp_path: Path, model: type[Classifier], arguments: Any
) -> None:
    """There may be no memory for those of a model that is not trained."""
    built = model()
    for parameter in built.parameters():
        parameter.register_hook(lambda gradient: pytest.fail("a gradient"))

    with pytest.raises(RuntimeError, match="must compute what its layers compute"):
        trainer(tmp_path, **arguments()).validate(built, Data())


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_evaluation_is_verified_once(tmp_path: Path, verb: str) -> None:
    sizes: list[int] = []
    model = Classifier()
    model.layers[0].register_forward_hook(
        lambda layer, args, output: None if layer.training else sizes.append(len(output))
    )

    def run(**options: Any) -> list[int]:
        sizes.clear()
        options["activation_checkpointing"] = "never"
        getattr(trainer(tmp_path, max_epochs=2, **plainly(**options)), verb)(model, Data())
        return list(sizes)

    plain = run(verify=False)
    assert run() == [2, 1, 3, *plain]


def test_batch_norm_in_the_pipeline_is_a_known_reason(tmp_path: Path) -> None:
    trainer(tmp_path, **stepped(), max_steps=1).fit(Normed(), Data())


@pytest.mark.parametrize("arguments", [looped, plainly, stepped])
@pytest.mark.parametrize("verify", ["sample", True])
@pytest.mark.parametrize(
    "layer, names",
    [(Routes, [".stats['spread']", ".load"]), (Counts, [".calls"])],
    ids=["routes", "counts"],
)
def test_value_that_a_layer_keeps(
    tmp_path: Path, arguments: Any, verify: Any, layer: type[nn.Module], names: list[str]
) -> None:
    """That of the last micro-batch was read in place of that of the batch, silently."""
    model = after(Model if arguments is looped else Classifier, layer)

    with pytest.warns(UserWarning, match="must be read by that layer only") as warned:
        trainer(tmp_path, max_steps=1, limit_val_batches=0, **arguments(verify=verify)).fit(
            model, Data()
        )

    [text] = {str(each.message) for each in warned if "read by that layer" in str(each.message)}
    found = text.partition("another in ")[2].partition(", most often")[0]
    assert [name.rpartition("1")[2].strip("'\"") for name in found.split(", ")] == names


class Counting(Classifier):
    """Keeps the rows of each call of its step, which no verification puts back, and draws."""

    seen: list[int]
    noisy = True

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.calls = 0
        if layers is not None:
            self.layers = layers.double()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        type(self).seen.append(len(x))
        self.calls += 1
        noise = 0.1 * torch.randn_like(x) if self.noisy else 0
        return super().training_step([x + noise, y], batch_idx)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: parametrized(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.BatchNorm1d(WIDTH),
        Noisy,
    ],
    ids=["norm by a hook", "norm by a parametrization", "batch norm", "noise"],
)
@pytest.mark.parametrize("arguments", [plainly, stepped])
def test_layer_with_a_known_reason(
    tmp_path: Path, layer: Callable[[], nn.Module], arguments: Any
) -> None:
    trainer(tmp_path, **arguments(), max_steps=1).fit(within(layer), Data())


@pytest.mark.parametrize("arguments", [looped, plainly, stepped])
def test_training_is_the_same_to_the_bit(tmp_path: Path, arguments: Any) -> None:
    def run(**options: Any) -> tuple[Any, ...]:
        Counting.seen = []
        build = partial(Counting, Looped() if arguments is looped else None)
        made = fitted(tmp_path, build=build, **arguments(**options))
        module = made.lightning_module
        assert isinstance(module, Counting)
        state = {name: value.tolist() for name, value in module.state_dict().items()}
        return state, made.callback_metrics, torch.get_rng_state().tolist(), module.calls

    torch.manual_seed(0)
    one = run()
    torch.manual_seed(0)
    assert one == run(verify=False)


class Quiet(Counting):
    noisy = False


def rows_of_steps(tmp_path: Path, **options: Any) -> list[int]:
    Counting.seen = Quiet.seen = []
    fitted(tmp_path, build=Quiet, max_epochs=1, **options)
    return Quiet.seen


def test_few_rows_run(tmp_path: Path) -> None:
    """As micro-batches, and together."""
    plain = rows_of_steps(tmp_path, **stepped(verify=False))

    assert rows_of_steps(tmp_path, **stepped()) == [2, 2, 4, *plain]


class Named(Classifier):
    """With names and numbers of the rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, names, numbers = batch
        assert len(names) == len(numbers) == len(x)
        factors = torch.tensor([float(name) for name in names], dtype=torch.float64)
        losses = F.cross_entropy(self(x), y, reduction="none")
        return (losses * factors * torch.from_numpy(numbers)).mean()


class NamedRows(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=7, collate_fn=self._collate)

    def _collate(self, rows: Any) -> Any:
        x, y = map(torch.stack, zip(*rows, strict=True))
        return x, y, [str(k) for k, _ in enumerate(y)], np.arange(len(y)) + 1.0


def test_lists_with_an_entry_per_row_are_cut(tmp_path: Path) -> None:
    """And in later batches, too: once the sample had all entries, which were then settings."""
    models = []
    for options in ({}, stepped(), stepped(verify=True)):
        torch.manual_seed(0)
        made = trainer(tmp_path, **options)
        made.fit(Named(), NamedRows())
        models.append(made)

    assert_same_weights(models[1], models[0])
    assert_same_weights(models[2], models[0])


class Padding(Data):
    """With a target that is to be ignored in the last rows."""

    def train_dataloader(self) -> Any:
        x, y = next(iter(DataLoader(rows(20, seed=1), batch_size=20)))
        y[16] = -100
        return DataLoader(TensorDataset(x, y), batch_size=10)


def test_targets_that_a_sample_does_not_show(tmp_path: Path) -> None:
    """Rows beside one without a target counted more than without the pipeline."""
    with pytest.raises(RuntimeError, match="with 4, 2, 3 targets that count .* of 4, 3, 3 rows"):
        trainer(tmp_path, **stepped()).fit(Classifier(), Padding())


def test_resumed_fit_is_not_verified(tmp_path: Path) -> None:
    Counting.seen = []
    made = fitted(tmp_path, build=Counting, max_epochs=1, **stepped(verify=False))
    made.save_checkpoint(tmp_path / "one.ckpt")
    Counting.seen = []

    fitted(tmp_path, build=Counting, ckpt_path=tmp_path / "one.ckpt", max_epochs=2, **stepped())

    assert sum(Counting.seen) == 20


def test_step_that_fails_on_few_rows_is_not_verified(tmp_path: Path) -> None:
    class Demanding(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) == 4:
                raise ValueError("four rows")
            return super().training_step(batch, batch_idx)

    one = fitted(tmp_path, build=Demanding, **stepped())

    assert_same_weights(one, fitted(tmp_path, build=Classifier, **stepped()))


def test_model_that_does_not_repeat_what_it_computes_is_not_verified(tmp_path: Path) -> None:
    class Growing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            counted.append(1)
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss * len(counted)

    counted: list[int] = []
    trainer(tmp_path, **stepped(), max_steps=1).fit(Growing(), Data())


def test_what_hooks_leave_is_put_back(tmp_path: Path) -> None:
    """A few rows came before those of the first batch."""

    class Collecting(Classifier):
        seen: list[Tensor]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = []
            loss = super().training_step(batch, batch_idx)
            assert sum(map(len, self.seen)) == len(batch[0])
            return loss

    model = Collecting()
    model.layers[0].register_forward_hook(
        lambda *call: model.seen.append(call[2]) if model.training else None
    )
    trainer(tmp_path, **plainly(activation_checkpointing="never"), max_steps=1).fit(model, Data())


@pytest.mark.parametrize("model", [Centred, Summed])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_single_micro_batch_is_not_verified(
    tmp_path: Path, model: type[Classifier], schedule: Any
) -> None:
    """It is the batch, whatever computes across its rows."""
    sizes: list[int] = []
    built = model()
    built.layers[0].register_forward_hook(lambda *call: sizes.append(len(call[2])))
    strategy = GPipeStrategy([3, 3], 1, activation_checkpointing="never", schedule=schedule)

    one_step = {"max_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer(tmp_path, strategy, devices=2, **one_step).fit(built, Data())

    assert sizes == [7]


def test_known_reason_is_no_difference(tmp_path: Path) -> None:
    model = Model()
    for block in model.layers.blocks:  # type: ignore[union-attr]
        block.register_module("norm", nn.BatchNorm1d(WIDTH).double())
        block.register_forward_hook(lambda self, args, output: self.norm(output))

    trainer(tmp_path, **looped(), max_steps=1).fit(model, Data())


@pytest.mark.parametrize(
    "value, path",
    [(len, "[1]"), (lambda x: tuple(x.shape), "[1][0]"), (lambda x: len(x) / 2, "[1]")],
    ids=["rows", "a shape", "a half"],
)
def test_number_that_depends_on_the_rows(
    tmp_path: Path, value: Callable[[Tensor], Any], path: str
) -> None:
    """That of a micro-batch was returned, where all had the same."""
    model = Classifier()
    model.layers[5].register_forward_hook(lambda self, args, output: (output, value(output)))
    model.forward = lambda x: model.head(model.layers(x)[0])  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match=rf"the output{re.escape(path)} differs"):
        trainer(tmp_path, limit_val_batches=0, **plainly()).fit(model, Data())


@pytest.mark.parametrize(
    "value",
    [lambda x: x.mean(0), lambda x: x.mean(0, keepdim=True)],
    ids=["a vector", "a row"],
)
def test_output_whose_rows_are_not_in_the_first_dim(
    tmp_path: Path, value: Callable[[Tensor], Tensor]
) -> None:
    """Those of the micro-batches were concatenated along it, silently."""
    with pytest.raises(RuntimeError, match=r"output\[1\] of layer 5 .* of shape .* instead of"):
        trainer(tmp_path, limit_val_batches=0, **plainly()).fit(Loaded(value), Data())


def test_number_for_each_micro_batch_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="one without dims that has a gradient"):
        trainer(tmp_path, limit_val_batches=0, **plainly()).fit(Loaded(torch.mean), Data())


class Fast(Classifier):
    """Whose layers are called with other weights, which are computed from their own."""

    def forward(self, x: Tensor) -> Tensor:
        fast = {name: p * p.cos() for name, p in self.layers.named_parameters()}
        return self.head(torch.func.functional_call(self.layers, fast, (x,)))


@pytest.mark.parametrize("verify", ["sample", True])
def test_functional_call_of_the_layers(tmp_path: Path, verify: Any) -> None:
    """The verification went backward through what computes the weights, so the step could not."""
    strategy = GPipeStrategy([2, 4], 3, module="layers", verify=verify)
    made = fitted(tmp_path, strategy, build=Fast, devices=2, max_epochs=1)

    assert_same_weights(made, fitted(tmp_path, build=Fast, max_epochs=1))

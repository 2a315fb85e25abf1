"""Nothing silent: a mini-batch split in a dim that layers mix is refused.

PyTorch's attention and recurrent layers with ``batch_first=False`` have the time in dim 0, where a
mini-batch is cut. PyTorch's own transformer guide was 1.18 off, without an error.

Here are also the tests of ``mixed_dims``.
"""

import re
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpipe import GPipe, MicroBatching, Rows
from tests.support.models import Call, assert_same_steps
from tests.support.pipes import Pipe, with_and_without_threads

W = 4
MIXES = "must not mix the dim in which the mini-batch was cut"


def sequence(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


class Apply(nn.Module):
    """Applies a module to its input, perhaps laid out in another way, and undoes that after."""

    def __init__(self, inner: nn.Module, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.inner = inner
        self.before = before
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.before is None else self.before(x)
        match self.inner:
            case nn.MultiheadAttention():
                y = self.inner(y, y, y, need_weights=False)[0]
            case nn.TransformerDecoderLayer() | nn.TransformerDecoder():
                y = self.inner(y, y)
            case nn.RNNBase():
                y = self.inner(y)[0]
            case _:
                y = self.inner(y)
        return y if self.after is None else self.after(y, x)


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, **options)


MIXING = {
    "attention": lambda **options: nn.MultiheadAttention(W, 2, **options),
    "encoder layer": encoder,
    "encoder": lambda **options: nn.TransformerEncoder(
        encoder(**options), 2, enable_nested_tensor=False
    ),
    "decoder layer": lambda **options: nn.TransformerDecoderLayer(W, 2, 8, dropout=0.0, **options),
    "rnn": lambda **options: nn.RNN(W, W, **options),
    "lstm": lambda **options: nn.LSTM(W, W, **options),
    "gru": lambda **options: nn.GRU(W, W, **options),
}
every_kind = pytest.mark.parametrize("kind", MIXING)


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(W, W), *more, nn.Linear(W, W)).double()


def model(kind: str, **options: Any) -> nn.Sequential:
    return layers(Apply(MIXING[kind](**options)))


# (time, rows): micro-batches of 3, 2, 2 and of 4, 4, 4, where 8 is a multiple of 4, and 5 is not.
@every_kind
@pytest.mark.parametrize("time, rows", [(7, 5), (12, 5), (12, 8), (7, 3)])
@with_and_without_threads
def test_time_that_was_cut(kind: str, time: int, rows: int, pipe: Pipe) -> None:
    with pytest.raises(ValueError, match=rf"layer 1 \(Apply\).*{MIXES}.*Rows\(dim=1\)"):
        pipe(model(kind))(sequence(time, rows, W))


@pytest.mark.parametrize("time, rows", [(7, 5), (12, 5), (12, 8), (7, 3)])
def test_time_that_was_cut_for_a_layer_itself(time: int, rows: int, pipe: Pipe) -> None:
    layer = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0)

    with pytest.raises(ValueError, match=rf"layer 1 \(TransformerEncoderLayer\).*{MIXES}"):
        pipe(layers(layer))(sequence(time, rows, W))


@every_kind
def test_rows_where_they_are(kind: str, pipe: Pipe) -> None:
    plain = model(kind)

    pipeline = pipe(plain, microbatching=Rows(dim=1))

    assert_same_steps(pipeline, plain, [sequence(7, 5, W), sequence(8, 4, W), sequence(3, 9, W)])


@every_kind
@pytest.mark.parametrize("rows, time", [(7, 5), (12, 4), (12, 8), (7, 3), (4, 2), (2, 1), (9, 1)])
def test_rows_first(kind: str, rows: int, time: int, pipe: Pipe) -> None:
    """The time may have the size of micro-batches by chance."""
    plain = model(kind, batch_first=True)

    assert_same_steps(pipe(plain), plain, [sequence(rows, time, W)])


@every_kind
@pytest.mark.parametrize("rows, time", [(7, 5), (12, 4), (12, 8), (7, 3), (4, 2)])
def test_layer_that_transposes(kind: str, rows: int, time: int, pipe: Pipe) -> None:
    swap = partial(torch.transpose, dim0=0, dim1=1)
    plain = layers(Apply(MIXING[kind](), swap, lambda y, _: swap(y)))

    assert_same_steps(pipe(plain), plain, [sequence(rows, time, W)])


@every_kind
@pytest.mark.parametrize("time", [7, 12])
def test_one_sequence_without_a_batch_dimension(kind: str, time: int, pipe: Pipe) -> None:
    with pytest.raises(ValueError, match=f"{MIXES}.*DataLoader.batch_size=1.*chunks=1"):
        pipe(model(kind))(sequence(time, W))


@every_kind
def test_one_micro_batch_is_never_wrong(kind: str, pipe: Pipe) -> None:
    plain = model(kind)

    batches = [sequence(7, 5, W), sequence(6, W)]

    assert_same_steps(pipe(plain, chunks=1), plain, batches)
    assert_same_steps(pipe(plain), plain, [sequence(1, 5, W)])


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequence(batch_first: bool, pipe: Pipe) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(W, W)

        def forward(self, x: Tensor) -> Tensor:
            lengths = [x.size(int(batch_first))] * x.size(int(not batch_first))
            packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=batch_first)
            return pad_packed_sequence(self.rnn(packed)[0], batch_first=batch_first)[0]

    plain = layers(Packed())

    if batch_first:
        assert_same_steps(pipe(plain), plain, [sequence(7, 5, W), sequence(12, 4, W)])
    else:
        with pytest.raises(ValueError, match=MIXES):
            pipe(plain)(sequence(7, 5, W))


@pytest.mark.parametrize("kind", [nn.Softmax, nn.LogSoftmax, nn.Softmin])
@pytest.mark.parametrize("rows", [7, 9])
def test_normalised_over_the_rows(kind: type[nn.Softmax], rows: int, pipe: Pipe) -> None:
    with pytest.raises(ValueError, match=rf"layer 1 \({kind.__name__}\).*{MIXES}"):
        pipe(layers(kind(dim=0)))(sequence(rows, W))

    plain = layers(kind(dim=-1))
    assert_same_steps(pipe(plain), plain, [sequence(rows, W)])


# No false alarms, where sizes coincide by chance: three micro-batches of four rows.


class Windows(nn.Module):
    """Attends within windows of four time steps, which are moved into the batch dimension."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.norm = nn.LayerNorm(W)
        self.attention = nn.MultiheadAttention(W, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(x).unflatten(1, (-1, 4)).flatten(0, 1)
        if not self.batch_first:
            windows = windows.transpose(0, 1)
        y = self.attention(windows, windows, windows)[0]
        return x + (y if self.batch_first else y.transpose(0, 1)).reshape(x.shape)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("time", [4, 8, 12, 16])
def test_windows_as_long_as_micro_batches(batch_first: bool, time: int, pipe: Pipe) -> None:
    plain = layers(Windows(batch_first=batch_first))

    assert_same_steps(pipe(plain), plain, [sequence(12, time, W)])


class Table(nn.Module):
    """Adds the mean of a table of its own, after a recurrent layer has read it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(sequence(*shape).detach())
        self.rnn = nn.GRU(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(self.table)[0].mean()


@pytest.mark.parametrize("shape", [(4, W), (4, 1, W), (4, 3, W), (4, 8, W)])
def test_table_as_long_as_micro_batches(shape: tuple[int, ...], pipe: Pipe) -> None:
    plain = layers(Table(*shape))

    assert_same_steps(pipe(plain), plain, [sequence(12, 5, W)])


class RowByRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.rnn(row)[0] for row in x])


@pytest.mark.parametrize("rows", [7, 12])
def test_rows_one_by_one(rows: int, pipe: Pipe) -> None:
    plain = layers(RowByRow())

    assert_same_steps(pipe(plain), plain, [sequence(rows, 4, W)])


class Queries(nn.Module):
    """Attends from each row to a table: a query is not mixed with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(sequence(5, W).detach())
        self.attention = nn.MultiheadAttention(W, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, self.table, self.table)
        return x + y


def test_rows_as_queries(pipe: Pipe) -> None:
    plain = layers(Queries())

    assert_same_steps(pipe(plain), plain, [sequence(7, W), sequence(12, W)])


# Samples without a batch dimension that do not fit.


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(8, 8), (8,)),
        (nn.Conv1d(8, 2, 3), (8, 5)),
        (nn.Conv2d(8, 2, 3), (8, 5, 5)),
        (nn.ConvTranspose2d(8, 2, 3), (8, 5, 5)),
        (nn.LayerNorm(8), (8,)),
        (nn.RMSNorm((8, 5)), (8, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sample_without_a_batch_dimension(
    layer: nn.Module, shape: tuple[int, ...], pipe: Pipe
) -> None:
    """PyTorch refuses the piece that it gets."""
    plain = nn.Sequential(nn.Tanh(), layer.double())

    with pytest.raises(RuntimeError) as error:
        pipe(plain)(sequence(*shape))

    assert_names_piece(error.value, rf"layer 1 \({type(layer).__name__}\)")

    assert_same_steps(pipe(plain), plain, [sequence(1, *shape), sequence(7, *shape)])


def assert_names_piece(error: BaseException, layer: str) -> None:
    assert re.search(rf"micro-batch 0 of 3 .* in {layer}", "\n".join(error.__notes__))


class Policy(nn.Module):
    """Is called with a batch of observations in training, and with one of them by an agent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize(
    "module, layer", [(Policy(), "blocks.0"), (layers(nn.Tanh()), "layer 0")], ids=type
)
def test_observation_without_a_batch_dimension(module: nn.Module, layer: str) -> None:
    plain = module.double()
    model = GPipe(deepcopy(plain), [1, 2], module="", devices=["cpu"] * 2, chunks=3)
    for _ in range(2):
        assert_same_steps(model, plain, [sequence(7, W)])
        with pytest.raises(RuntimeError) as error, torch.no_grad():
            model(sequence(W))
        assert_names_piece(error.value, rf"{layer} \(Linear\)")
    x = sequence(W)
    torch.testing.assert_close(model(x[None])[0], plain(x))
    model.close()


def test_observation_in_a_loop() -> None:
    """After a batch, which the same blocks had got, it was a bare error about shapes."""
    plain = Policy().double()
    model = GPipe(deepcopy(plain), [1, 2], module="blocks", devices=["cpu"] * 2, chunks=3)
    for _ in range(2):
        assert_same_steps(model, plain, [sequence(7, W)])
        expected = r"blocks.0 \(.*:\d+\) runs on all .* as x\[None\] has"
        with pytest.raises(ValueError, match=expected), torch.no_grad():
            model(sequence(W))
    model.close()


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, W)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.bags(*batch)


def test_offsets_as_many_as_indices(pipe: Pipe) -> None:
    """Cut with the indices, they pointed behind them."""
    plain = nn.Sequential(Bags(), nn.Linear(W, W))

    with pytest.raises(ValueError, match=r"its bags \(EmbeddingBag\) must get offsets into the"):
        pipe(plain)((torch.arange(7), torch.tensor([0, 1, 2, 4, 4, 5, 6])))


def test_offsets_that_a_layer_computes(pipe: Pipe) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(50, W)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            tokens, lengths = batch["tokens"], batch["lengths"]
            kept = tokens[torch.arange(tokens.size(1)) < lengths[:, None]]
            return self.bags(kept, lengths.cumsum(0) - lengths)

    plain = nn.Sequential(Padded(), nn.Linear(W, W)).double()
    lengths = torch.tensor([3, 1, 2, 5, 4, 2, 2])

    batch = {"tokens": torch.arange(35).reshape(7, 5), "lengths": lengths}

    assert_same_steps(pipe(plain), plain, [batch])


# Embeddings that count indices.


def counting(kind: type[nn.Embedding | nn.EmbeddingBag]) -> tuple[nn.Sequential, Tensor]:
    inner = Apply(kind(3, W, scale_grad_by_freq=True))
    indices = torch.randint(3, (7, 2), generator=torch.Generator().manual_seed(0))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(W, 1)).double(), indices


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_frequencies_in_a_micro_batch(pipe: Pipe, kind: Any) -> None:
    """Once gradients were divided by these instead of those in the mini-batch."""
    plain, indices = counting(kind)
    model = pipe(plain)
    message = rf"needs whole mini-batches, .* 3 micro-batches for layer 0.inner \({kind.__name__}\)"

    with pytest.raises(ValueError, match=message):
        model(indices)
    with pytest.raises(ValueError, match=message):
        model.by_micro_batch(lambda x: model(x).mean(), indices)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_frequencies_that_are_those_of_the_mini_batch(pipe: Pipe, kind: Any) -> None:
    plain, indices = counting(kind)
    assert_same_steps(pipe(plain, chunks=1), plain, [indices])
    assert_same_steps(pipe(plain), plain, [indices[:1]])


def test_frequencies_that_divide_no_gradient(pipe: Pipe) -> None:
    plain, indices = counting(nn.Embedding)
    model = pipe(plain)
    with torch.no_grad():
        torch.testing.assert_close(model(indices), plain(indices))

    for each in (model, plain):
        each[0].requires_grad_(False)
    assert_same_steps(model, plain, [indices])

    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="scale_grad_by_freq=True needs whole mini-batches"):
        model(indices)


# What it costs, and what it leaves.


def test_modules_are_watched_in_the_first_mini_batch_only(pipe: Pipe) -> None:
    class Listens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(W, W, batch_first=True)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append("forward" in vars(self.rnn))
            return self.rnn(x)[0]

    plain = layers(Listens())
    pipeline = pipe(plain, copy=False, mode="never")
    listens = plain[1]
    assert isinstance(listens, Listens)

    for _ in range(2):
        pipeline(sequence(7, 5, W)).sum().backward()
    pipeline.eval()(sequence(7, 5, W))

    assert listens.seen == [True] * 3 + [False] * 3 + [True] * 3
    assert "forward" not in vars(listens.rnn)
    assert "forward" not in vars(listens)


def test_modules_are_watched_only_while_they_run(pipe: Pipe) -> None:
    rnn = nn.GRU(W, W, batch_first=True)
    watched: list[bool] = []

    def look(x: Tensor) -> Tensor:
        watched.append("forward" in vars(rnn))
        return x

    plain = layers(Apply(rnn), Call(look))
    pipe(plain, [2, 2], copy=False, threads=False)(sequence(7, 5, W))

    assert watched == [False] * 3


def test_modules_are_left_alone_after_an_error(pipe: Pipe) -> None:
    plain = model("gru")
    pipeline = pipe(plain, copy=False)

    for _ in range(2):  # it is refused again
        with pytest.raises(ValueError, match=MIXES):
            pipeline(sequence(7, 5, W))

    assert not any("forward" in vars(module) for module in plain.modules())


def test_compiled_modules_are_not_watched(pipe: Pipe) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(-1)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append("forward" in vars(self.softmax))
            return self.softmax(x)

    plain = nn.Sequential(nn.Linear(W, W), Inner()).double()
    inner = plain[1]
    assert isinstance(inner, Inner)
    inner._compiled_call_impl = inner._call_impl  # as compile() does

    pipe(plain, copy=False)(sequence(7, W))

    assert inner.seen and not any(inner.seen)


def test_rows_of_other_micro_batches_are_not_known(pipe: Pipe) -> None:
    """Without division() the pipeline does not know where the rows are."""

    class Columns(MicroBatching):
        def split(self, batch: Tensor, chunks: int) -> list[Tensor]:
            return list(batch.chunk(chunks, 1))

        def merge(self, outputs: Any, batch: Tensor) -> Tensor:
            return torch.cat(list(outputs), 1)

    plain = model("gru")

    assert_same_steps(pipe(plain, microbatching=Columns()), plain, [sequence(7, 5, W)])

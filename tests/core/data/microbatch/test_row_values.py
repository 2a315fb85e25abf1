"""Promise: lists, tuples and arrays with an entry per row go with their rows, others are whole."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_gpipe import MicroBatching, PaddedSequences, Rows, whole
from tests.support.models import rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

NAMES = ["a", "b", "c", "d", "e", "f", "g"]
SIZES = torch.tensor([1, 2, 3, 4, 5, 6, 7])


def split(value: Any, count: int = 7, chunks: int = 3) -> list[Any]:
    """What each micro-batch gets of a value."""
    return [each["value"] for each in Rows().split({"x": rows(count), "value": value}, chunks)]


@pytest.mark.parametrize(
    "value",
    [
        NAMES,
        tuple(NAMES),
        list(range(7)),
        [None, 1, 2.0, "d", (), {}, []],
        [{"id": k} for k in range(7)],
        [[0] * k for k in range(7)],  # of other lengths
        [b"x"] * 7,
    ],
    ids=str,
)
def test_values_of_rows(value: Any) -> None:
    pieces = split(value)

    assert pieces == [value[:3], value[3:5], value[5:]]
    assert all(isinstance(piece, type(value)) for piece in pieces)


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 7)])
def test_rows_of_an_array(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)

    pieces = split(array)

    assert [len(piece) for piece in pieces] == [3, 2, 2]
    assert np.array_equal(np.concatenate(pieces), array)


@pytest.mark.parametrize(
    "value",
    [
        ["a", "b"],
        ("a", "b", "c"),  # as many as the first micro-batch has rows
        [],
        (224, 224),
        np.arange(3),
        np.array(7),
        np.ones((2, 7)),
        {"names": ["a", "b"]},
        {"a", "b", "c", "d", "e", "f", "g"},
        "abcdefg",
        whole(NAMES),
        whole(tuple(NAMES)),
        whole(np.arange(7)),
        whole((1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_other_values_are_whole(value: Any) -> None:
    for piece in split(value):
        np.testing.assert_equal(piece, value)


@pytest.mark.parametrize(
    "value, found",
    [
        ((1, 2, 3, 4, 5, 6, 7), "a tuple of 7 values, which may also be settings"),
        ((None, *NAMES[1:]), "a tuple of 7 values"),
        ([["x"] * 7 for _ in range(7)], "7 lists of 7 values each"),
        ([tuple(NAMES) for _ in range(7)], "7 lists of 7 values each"),
    ],
)
def test_values_that_may_be_of_rows_or_not(value: Any, found: str) -> None:
    with pytest.raises(ValueError, match=r"write whole\(value\)") as error:
        split({"deep": [value]} if "tuple" in found else value)

    assert found in str(error.value)
    assert "got input['value']" in str(error.value)


def test_one_micro_batch_gets_what_there_is() -> None:
    value = (1, 2, 3, 4, 5, 6, 7)

    assert split(value, chunks=1) == [value]


def test_settings_of_earlier_mini_batches_stay_settings() -> None:
    """The last mini-batch of an epoch is smaller, and may have as many rows as there are names."""
    method = Rows()
    batches = [{"x": rows(count), "names": ["a", "b"], "size": (3, 4)} for count in (7, 2)]

    for batch in batches:
        for piece in method.split(batch, 2):
            assert piece["names"] == ["a", "b"]
            assert piece["size"] == (3, 4)


def test_what_default_collate_makes() -> None:
    samples = [(x, name, {"text": name.upper()}) for x, name in zip(rows(7), NAMES, strict=True)]
    batch = default_collate(samples)

    first, *_ = Rows().split(batch, 3)

    assert list(first[1]) == ["a", "b", "c"]
    assert first[2]["text"] == ["A", "B", "C"]


class Named(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Record:
    x: Tensor
    names: list[str]


@pytest.mark.parametrize("kind", [Named, Record])
def test_fields(kind: type[Named] | type[Record]) -> None:
    batch = kind(rows(7), NAMES)

    pieces = Rows().split(batch, 3)

    assert [piece.names for piece in pieces] == [NAMES[:3], NAMES[3:5], NAMES[5:]]
    assert Rows().merge(pieces, batch).names == NAMES


@pytest.mark.parametrize("value", [NAMES, tuple(NAMES), list(range(7)), [{"k": 1}] * 7], ids=str)
def test_merged_is_what_was_split(value: Any) -> None:
    batch = {"x": rows(7), "value": value}

    merged = Rows().merge(Rows().split(batch, 3), batch)

    assert merged["value"] == value
    assert type(merged["value"]) is type(value)


def test_merged_array_is_what_was_split() -> None:
    array = np.arange(14).reshape(7, 2)
    batch = {"x": rows(7), "value": array}

    merged = Rows().merge(Rows().split(batch, 3), batch)["value"]

    assert type(merged) is np.ndarray
    assert np.array_equal(merged, array)


def texts(*values: Any, sizes: list[int]) -> list[Any]:
    """Outputs of micro-batches of these sizes, and the mini-batch."""
    outputs = [{"x": rows(n), "texts": value} for n, value in zip(sizes, values, strict=True)]
    return [outputs, {"x": rows(sum(sizes))}]


@pytest.mark.parametrize(
    "values, sizes, merged",
    [
        ((["a", "b"], ["c"]), [2, 1], ["a", "b", "c"]),
        ((["a", "b"], ["c", "d"]), [2, 2], ["a", "b", "c", "d"]),
        ((("a",), ("b",)), [1, 1], ("a", "b")),
        ((["a", "b"], ["a", "b"]), [3, 2], ["a", "b"]),  # of the whole mini-batch
        ((["a"], ["a"]), [3, 3], ["a"]),
        ((whole(["a", "b"]), whole(["a", "b"])), [2, 2], ["a", "b"]),
    ],
)
def test_strings_that_layers_make(values: Any, sizes: list[int], merged: Any) -> None:
    found = Rows().merge(*texts(*values, sizes=sizes))

    assert found["texts"] == merged
    assert isinstance(found["texts"], type(merged))


def test_strings_of_settings_beside_a_dataclass() -> None:
    outputs = [(Record(rows(k), NAMES[:1]), ["left", "right"]) for k in (3, 2)]

    assert Rows().merge(outputs, rows(5))[1] == ["left", "right"]


@pytest.mark.parametrize(
    "values, sizes, message",
    [
        ((["a", "b"], ["a", "b"]), [2, 2], "it must be clear whether strings belong to rows"),
        ((["a", "b"], ["c", "d"]), [3, 3], "must be the same for all micro-batches"),
        (([1, 2], [3, 4]), [2, 2], "must be the same for all micro-batches"),
        (([1, 2], [3]), [2, 1], "one structure"),
        ((np.ones(2), np.zeros(2)), [2, 2], "must be the same for all micro-batches"),
    ],
)
def test_values_that_layers_make_are_refused(values: Any, sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rows().merge(*texts(*values, sizes=sizes))


def test_settings_that_layers_return_are_known_from_the_batch() -> None:
    batch = {"x": rows(4), "names": ["a", "b"]}  # as many as each micro-batch has rows

    assert Rows().merge(Rows().split(batch, 2), batch)["names"] == ["a", "b"]


def test_copy_of_the_way_to_split() -> None:
    assert deepcopy(Rows()).split({"x": rows(2), "names": ["a", "b"]}, 2)[1]["names"] == ["b"]


# In a pipeline.


class Say(nn.Module):
    """Pairs its rows with their names, and notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        names, ids = batch["names"], batch["ids"]
        assert len(names) == len(ids) == len(batch["x"])
        scale = torch.tensor([float(ord(name)) for name in names], dtype=torch.float64)[:, None]
        y = self.linear(batch["x"]) * scale / 100 + torch.from_numpy(ids)[:, None]
        said = [f"{name} {k}" for name, k in zip(names, ids, strict=True)]
        return {**batch, "x": y, "said": said}


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("microbatching", [None, "padded", "padded, in order"])
def test_names_go_with_their_rows(microbatching: str | None, pipe: Pipe) -> None:
    """They went whole to every micro-batch, so rows were paired with the names of others."""
    torch.manual_seed(3)
    plain = nn.Sequential(Say(), nn.Identity(), Say()).double()
    how: MicroBatching | None = None
    if microbatching is not None:
        sort = "order" not in microbatching
        how = PaddedSequences("n", trim=["x"], pad_outputs=["x"], sort=sort)
    pipeline = pipe(plain, microbatching=how)

    for count, chunks in ((7, 3), (7, 1), (3, 3)):
        lengths = torch.tensor([3, 1, 3, 2, 3, 1, 2])[:count]
        batch = {
            "x": rows(7)[:count].detach(),
            "n": lengths if microbatching is None else torch.full((count,), 3),
            "names": NAMES[:count],
            "ids": np.arange(7.0)[:count],
            "settings": ["left", "right"],
        }
        pipeline.chunks = chunks
        found, expected = pipeline(batch), plain(batch)

        torch.testing.assert_close(found["x"], expected["x"])
        for name in ("names", "said", "settings"):
            assert found[name] == expected[name]
            assert type(found[name]) is type(expected[name])
        assert np.array_equal(found["ids"], expected["ids"])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_sorted_rows_keep_their_names(chunks: int) -> None:
    method = PaddedSequences("n", trim=["x"], pad_outputs=["x"])
    lengths = torch.tensor([1, 3, 2, 5])
    batch = {
        "x": torch.arange(4.0)[:, None].expand(4, 5),
        "n": lengths,
        "names": ["1", "3", "2", "5"],
        "array": lengths.numpy() * 10,
    }

    pieces = method.split(batch, chunks)

    for piece in pieces:
        assert [int(name) for name in piece["names"]] == piece["n"].tolist()
        assert piece["array"].tolist() == [10 * n for n in piece["n"].tolist()]
    made = [{**piece, "made": [f"{name}!" for name in piece["names"]]} for piece in pieces]
    merged = method.merge(made, batch)
    assert merged["names"] == batch["names"]
    assert merged["made"] == ["1!", "3!", "2!", "5!"]
    assert merged["array"].tolist() == [10, 30, 20, 50]


def test_list_is_not_shared_with_other_micro_batches(pipe: Pipe) -> None:
    class Appends(nn.Module):
        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            assert len(batch["names"]) == len(batch["x"])
            batch["names"][0] += "!"
            return batch

    plain = nn.Sequential(Appends(), nn.Identity())
    batch = {"x": rows(7), "names": list(NAMES)}

    output = pipe(plain, mode="always")(batch)
    output["x"].sum().backward()

    assert output["names"] == ["a!", "b", "c", "d!", "e", "f!", "g"]
    assert batch["names"] == NAMES

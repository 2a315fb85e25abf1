"""Promise: who declares one thing and does another is told; a run that failed harms no other."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.skip.declare import (
    Namespace,
    in_flight,
    pop,
    skippable,
    stash,
    using_table,
    with_skips,
)
from tests.support.faults import OwnError
from tests.support.models import Call
from tests.support.skip_layers import Forward, Pop, Stash


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    with using_table({}):
        yield


def one() -> Tensor:
    return torch.ones(1)


# The declaration.


@pytest.mark.parametrize("decorator", [skippable, with_skips])
@pytest.mark.parametrize("argument", ["stash", "pop"])
def test_string_in_the_place_of_a_list(decorator: Callable[..., Any], argument: str) -> None:
    with pytest.raises(TypeError) as error:
        decorator(**{argument: "skip"})

    assert str(error.value) == (f"{argument} must be a list of names: got 'skip'. Write ['skip'].")


@pytest.mark.parametrize("argument", ["stash", "pop"])
def test_names_that_are_no_strings(argument: str) -> None:
    names: Any = ["a", 3, None]

    with pytest.raises(TypeError, match=rf"{argument} must be .* as strings: got \[3, None\]"):
        skippable(**{argument: names})
    with pytest.raises(TypeError, match=r"only must be a list of names: got 'a'"):
        Stash().isolate(Namespace(), only="a")  # type: ignore[operator]


# The forward.


def layer_that(does: Callable[[Tensor], Forward], **declared: list[str]) -> nn.Module:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            result = yield from does(x)
            return result

    return skippable(**declared)(Layer)()


def stashes(x: Tensor) -> Forward:
    yield stash("skip", x)
    return x


def pops(x: Tensor) -> Forward:
    skip = yield pop("skip")
    return x + skip


def yields(what: Any) -> Callable[[Tensor], Forward]:
    def does(x: Tensor) -> Forward:
        yield what
        return x

    return does


def ends(x: Tensor) -> Forward:
    yield from ()
    return x


@pytest.mark.parametrize(
    "does, declared, message",
    [
        (stashes, {"stash": ["other"]}, "got stash('skip') in its forward, and stash=['other']"),
        (stashes, {"pop": ["skip"]}, "got stash('skip') in its forward, and stash=[]"),
        (pops, {"stash": ["skip"]}, "got pop('skip') in its forward, and pop=[]"),
        (pops, {"pop": ["skip"]}, "'skip' must be stashed before Layer pops it: no layer did"),
        (stashes, {"stash": ["skip", "b"]}, "its forward ended without stash('b')"),
        (
            ends,
            {"stash": ["b", "a"], "pop": ["c"]},
            "its forward ended without pop('c'), stash('a'), stash('b'). To pass nothing on, stash",
        ),
    ],
)
def test_forward_that_does_not_do_what_is_declared(
    does: Callable[[Tensor], Forward], declared: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(RuntimeError) as error:
        layer_that(does, **declared)(one())

    assert message in str(error.value)


@pytest.mark.parametrize(
    "what, kind", [(None, "NoneType"), (("skip", 1), "tuple"), ("skip", "str"), (stash, "type")]
)
def test_forward_that_yields_other_things(what: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"must yield stash\(name, tensor\) .* got {kind}\."):
        layer_that(yields(what), stash=["skip"])(one())


@pytest.mark.parametrize("what", [(torch.ones(1), torch.ones(1)), [torch.ones(1)], 3, "x"])
def test_stash_of_what_is_no_tensor(what: Any) -> None:
    with pytest.raises(TypeError, match="skip"):
        nn.Sequential(Stash(lambda x: what), Pop(lambda x, skip: x))(one())


def test_forward_that_declares_and_yields_nothing() -> None:
    """Once only the layer that popped noticed what was not stashed, far from the fault."""

    @skippable(stash=["skip"])
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(RuntimeError, match=r"ended without stash\('skip'\)"):
        Plain()(one())


def plain_that_returns(what: Any) -> nn.Module:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return what

    return with_skips(stash=["skip"])(Layer)()


@pytest.mark.parametrize(
    "what", [one(), (one(), one()), {"skip": one()}, (one(), {"skip": one()}, 3), None]
)
def test_plain_forward_that_returns_no_pair(what: Any) -> None:
    with pytest.raises(TypeError, match=r"must return \(output, stashes\).* got \w+\."):
        plain_that_returns(what)(one())


def test_plain_forward_that_returns_other_names() -> None:
    with pytest.raises(RuntimeError, match=r"ended without stash\('skip'\)"):
        plain_that_returns((one(), {}))(one())
    with pytest.raises(RuntimeError, match=r"got stash\('b'\) in its forward"):
        plain_that_returns((one(), {"skip": one(), "b": one()}))(one())


# Exceptions.


def fail(x: Any) -> Any:
    raise OwnError


def test_exception_in_a_generator_passes_through_and_closes_it() -> None:
    closed = []

    def does(x: Tensor) -> Forward:
        try:
            yield stash("skip", x)
            raise OwnError
        finally:
            closed.append(True)

    with pytest.raises(OwnError):
        layer_that(does, stash=["skip"])(one())
    assert closed == [True]


def test_forward_that_handles_an_exception_of_its_own() -> None:
    def does(x: Tensor) -> Forward:
        try:
            fail(x)
        except OwnError:
            yield stash("skip", x * 2)
        return x

    assert torch.equal(nn.Sequential(layer_that(does, stash=["skip"]), Pop())(one()), one() * 3)


def test_what_a_failed_run_left_does_not_disturb_the_next() -> None:
    fuse = Call(fail)
    module = nn.Sequential(Stash(lambda x: x * 2), fuse, Pop())
    with pytest.raises(OwnError):
        module(one())

    fuse.function = torch.sin
    y = module(one() * 5)

    assert torch.equal(y, (one() * 5).sin() + 10)
    assert not in_flight()


def test_what_failed_runs_left_does_not_add_up() -> None:
    module = nn.Sequential(Stash(torch.sin), Call(fail), Pop())
    alive = []

    for _ in range(3):
        x = torch.ones(1)
        with pytest.raises(OwnError):
            module(x)
        alive.append(weakref.ref(next(iter(in_flight().values()))))
    gc.collect()

    assert [each() is not None for each in alive] == [False, False, True]

"""Promise: before anything runs it is known where each skip tensor goes, and all that is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.layout.partition import cut, stages_of_layers
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.skip.declare import Namespace, pop, skippable, stash
from lightning_gpipe.core.skip.skip_layout import (
    Skip,
    leaving_tensors,
    routes_of,
    skips_of,
    table_of,
    verify_skippables,
)
from tests.support.pipes import Pipe
from tests.support.skip_layers import Forward, Pop, Stash, pair

SKIP = SkipName(None, "skip")


def named(**declared: list[str]) -> nn.Module:
    """A layer that declares names, all of which it stashes or pops."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            for name in declared.get("pop", []):
                yield pop(name)
            for name in declared.get("stash", []):
                yield stash(name, x)
            return x

    return skippable(**declared)(Layer)()


def message_of(module: nn.Sequential) -> str:
    with pytest.raises(TypeError) as error:
        verify_skippables(module)
    return str(error.value)


# The layout.


def test_no_skips() -> None:
    assert skips_of(nn.Sequential(nn.Tanh(), nn.Tanh())) == []
    assert skips_of(nn.Sequential()) == []


def test_skips_by_their_layers() -> None:
    module = nn.Sequential(
        named(stash=["a", "b"]), nn.Tanh(), named(stash=["c"], pop=["b"]), named(pop=["a", "c"])
    )

    a, b, c = (SkipName(None, name) for name in "abc")
    assert skips_of(module) == [Skip(a, 0, 3), Skip(b, 0, 2), Skip(c, 2, 3)]


def test_same_name_in_different_namespaces() -> None:
    (first, last), (second, third) = pair(), pair()

    skips = skips_of(nn.Sequential(Stash(), first, second, third, last, Pop()))

    assert [(name.name, i, j) for name, i, j in skips] == [
        ("skip", 0, 5),
        ("skip", 1, 4),
        ("skip", 2, 3),
    ]
    assert len({name.namespace for name, _, _ in skips}) == 3


def test_modules_nested_in_layers_count_as_the_layer() -> None:
    inside = nn.ModuleDict({"a": nn.ModuleList([nn.Tanh(), Stash()])})

    module = nn.Sequential(nn.Tanh(), inside, nn.Sequential(nn.Sequential(nn.Tanh(), Pop())))

    assert skips_of(module) == [Skip(SKIP, 1, 2)]


@pytest.mark.parametrize("inside", [[Stash(), Pop()], [Pop(), nn.Tanh(), Stash()]])
def test_skip_within_one_layer(inside: list[nn.Module]) -> None:
    module = nn.Sequential(nn.Tanh(), nn.Sequential(*inside))

    verify_skippables(module)

    assert skips_of(module) == [Skip(SKIP, 1, 1)]


def test_layer_that_pops_a_name_and_stashes_it_in_another_namespace() -> None:
    layer = named(stash=["new"], pop=["skip"])
    layer.isolate(Namespace(), only=["new"])  # type: ignore[operator]

    assert "'new' (isolated) is stashed by layer 1 (Layer) and never popped" in message_of(
        nn.Sequential(Stash(), layer)
    )


# What is wrong.


def test_stashed_and_never_popped() -> None:
    assert message_of(nn.Sequential(nn.Tanh(), Stash(), nn.Tanh())) == (
        "every skip tensor must be stashed by one layer and popped by one that comes after it: got "
        "'skip' is stashed by layer 1 (Stash) and never popped. Layers that repeat names need a "
        "Namespace each: layer.isolate(namespace)."
    )


@pytest.mark.parametrize(
    "layers, fault",
    [
        ([Pop()], "'skip' is popped by layer 0 (Pop) and never stashed"),
        (
            [nn.Tanh(), Pop(), Stash()],
            "'skip' is popped by layer 1 (Pop) before layer 2 (Stash) stashes it",
        ),
        (
            [Stash(), nn.Tanh(), Stash(), Pop()],
            "'skip' is stashed by layer 0 (Stash) and by layer 2 (Stash)",
        ),
        ([Stash(), Pop(), Pop()], "'skip' is popped by layer 1 (Pop) and by layer 2 (Pop)"),
        (
            [nn.Sequential(nn.Tanh(), nn.Sequential(Stash())), nn.Tanh()],
            "'skip' is stashed by layer 0.1.0 (Stash) and never popped",
        ),
        (
            [nn.Sequential(Stash(), Stash()), Pop()],
            "'skip' is stashed by layer 0.0 (Stash) and by layer 0.1 (Stash)",
        ),
    ],
)
def test_one_fault(layers: list[nn.Module], fault: str) -> None:
    assert f": got {fault}. Layers" in message_of(nn.Sequential(*layers))


def test_same_layer_twice() -> None:
    layer = Stash()

    message = message_of(nn.Sequential(layer, layer, Pop()))

    assert ": got 'skip' is stashed by layer 0 (Stash) and by layer 1 (Stash). " in message


def test_all_faults_in_one_message() -> None:
    isolated = Stash().isolate(Namespace())  # type: ignore[operator]
    module = nn.Sequential(
        named(pop=["late", "nowhere"]),
        named(stash=["twice", "kept", "good"]),
        nn.Sequential(nn.Tanh(), named(stash=["twice", "late"])),
        isolated,
        named(pop=["good", "twice"]),
    )

    assert message_of(module) == (
        "every skip tensor must be stashed by one layer and popped by one that comes after it: got "
        "'twice' is stashed by layer 1 (Layer) and by layer 2.1 (Layer); "
        "'kept' is stashed by layer 1 (Layer) and never popped; "
        "'late' is popped by layer 0 (Layer) before layer 2.1 (Layer) stashes it; "
        "'skip' (isolated) is stashed by layer 3 (Stash) and never popped; "
        "'nowhere' is popped by layer 0 (Layer) and never stashed. "
        "Layers that repeat names need a Namespace each: layer.isolate(namespace)."
    )


def test_stash_and_pop_in_different_namespaces() -> None:
    module = nn.Sequential(pair()[0], pair()[1])

    message = message_of(module)

    assert "'skip' (isolated) is stashed by layer 0 (Stash) and never popped" in message
    assert "'skip' (isolated) is popped by layer 1 (Pop) and never stashed" in message


@pytest.mark.parametrize("check", [verify_skippables, lambda m: GPipe(m, [1, 1], devices=["cpu"])])
def test_pipeline_refuses_what_the_check_refuses(check: Callable[[nn.Sequential], Any]) -> None:
    with pytest.raises(TypeError, match="stashed by layer 0.*never popped"):
        check(nn.Sequential(Stash(), nn.Tanh()))


# The routes.


@pytest.mark.parametrize(
    "balance, expected",
    [
        ([6], {}),
        ([5, 1], {0: (0, 1)}),
        ([3, 3], {0: (0, 1), 1: (0, 1), 2: (0, 1)}),
        ([1, 1, 4], {0: (0, 2), 1: (1, 2)}),
        ([2, 2, 2], {0: (0, 2), 1: (0, 1), 2: (1, 2)}),
        ([1, 3, 2], {0: (0, 2), 2: (1, 2)}),
        ([1] * 6, {0: (0, 5), 1: (1, 3), 2: (2, 4)}),
    ],
)
def test_routes(balance: list[int], expected: dict[int, tuple[int, int]]) -> None:
    (a, f), (b, d), (c, e) = pair(), pair(), pair()
    module = nn.Sequential(a, b, c, d, e, f)  # 0 to 5, 1 to 3, 2 to 4
    skips = skips_of(module)

    routes = routes_of(skips, stages_of_layers(cut(module, balance)))

    assert routes == [Route(skips[k].name, *way) for k, way in expected.items()]


# What a stage finds, and what it leaves.


def test_table_of_a_stage() -> None:
    a, b = (Route(SkipName(None, name), 0, 1) for name in "ab")
    x = torch.ones(1)

    table = table_of([a, b], [x, None])

    assert table == {a.name: x, b.name: None}
    assert leaving_tensors(table, [b, a]) == [None, x]
    assert leaving_tensors({}, []) == []


def test_table_with_other_tensors_than_leave() -> None:
    a, b, c = (Route(SkipName(None, name), 0, 1) for name in "abc")

    with pytest.raises(RuntimeError) as error:
        leaving_tensors({c.name: None}, [a, b])

    assert str(error.value) == (
        "every skippable module within a layer must run in each forward: no module stashed "
        "'a', no module stashed 'b', no module popped 'c'. To pass nothing on, stash None."
    )


def test_table_with_too_few_or_too_many_tensors() -> None:
    a = Route(SkipName(None, "a"), 0, 1)

    with pytest.raises(RuntimeError, match="no module stashed 'a'. To"):
        leaving_tensors({}, [a])
    with pytest.raises(RuntimeError, match="no module popped 'a'. To"):
        leaving_tensors({a.name: None}, [])


class Sometimes(nn.Module):
    """Runs a layer if told to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.runs = True

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) if self.runs else x


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("skipped", [0, 2])
def test_skippable_module_that_does_not_run(skipped: int, balance: list[int], pipe: Pipe) -> None:
    module = nn.Sequential(Sometimes(Stash()), nn.Tanh(), Sometimes(Pop()))
    pipeline = pipe(module, balance, chunks=1)
    x = torch.ones(2, 1)
    pipeline(x)

    layer = pipeline[skipped]
    assert isinstance(layer, Sometimes)
    layer.runs = False
    with pytest.raises(RuntimeError, match="no module (stashed|popped) 'skip'|must be stashed"):
        pipeline(x)
    layer.runs = True

    assert torch.equal(pipeline(x), x + x.tanh())

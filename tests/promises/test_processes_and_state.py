"""Same numbers: each process has the state dict, and refuses what the others refuse."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_gpipe import GPipe
from lightning_gpipe.core.pipeline import build
from tests.support.models import rows
from tests.support.processes import assert_equal, processes, said
from tests.support.ranks import Pool

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def linear() -> nn.Linear:
    return nn.Linear(3, 3).double()


def layers(seed: int = 3) -> nn.Sequential:
    """One with a parametrized weight and one with buffers, in each of two stages."""
    torch.manual_seed(seed)
    pairs = [(weight_norm(linear()), nn.BatchNorm1d(3).double()) for _ in range(2)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def piped(module: nn.Sequential) -> GPipe:
    return GPipe(module, [2, 2], devices=["cpu"] * 2, chunks=2, **processes((0, 1)))


def loaded() -> tuple[list[str], dict[str, Tensor], Tensor]:
    """The names and the values of the state dict of another model, loaded; and an output of it."""
    pipeline = piped(layers())
    pipeline.load_state_dict(layers(seed=7).state_dict())
    y = pipeline.eval()(rows(4)).detach()
    pipeline.close()
    state = pipeline.state_dict()
    return list(state), {name: x for name, x in state.items() if not x.is_meta}, y


def test_state_dict_of_the_whole_model_is_loaded_in_each_process(four_ranks: Pool) -> None:
    model = layers(seed=7).eval()

    found = four_ranks.run(loaded, among=2)

    for names, _, y in found:
        assert names == list(model.state_dict())
        torch.testing.assert_close(y, model(rows(4)).detach())  # its micro-batches are smaller
    one, other = (values for _, values, _ in found)
    assert not set(one) & set(other)
    assert_equal({**one, **other}, dict(model.state_dict()))


class Recurrent(nn.Module):
    """A GRU, which has weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 3, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return Tensor(self.gru(x[:, None])[0][:, 0])


def recurrent() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Recurrent() for _ in range(4)))


def normed() -> nn.Sequential:
    """Layers that keep a weight that is computed from their parameters, with its graph."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(3, 3).double()) for _ in range(4)))


def run_swapped(build: Callable[[], nn.Sequential]) -> Tensor:
    pipeline = piped(build())
    y = pipeline(rows(4))
    y.square().mean().backward()
    pipeline.close()
    return y.detach()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("build", [recurrent, normed])
def test_layers_whose_parameters_pytorch_does_not_swap(
    four_ranks: Pool, build: Callable[[], nn.Sequential]
) -> None:
    for y in four_ranks.run(run_swapped, build, among=2):
        torch.testing.assert_close(y, build()(rows(4)).detach())


def test_recurrent_layers_that_were_built_without_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Sequential(Recurrent()) for _ in range(2)))
    pipeline = GPipe(module, [1, 1], devices=["cpu"] * 2)

    assert not pipeline(rows(4)).isnan().any()


def printed(table: Table) -> str:
    console = Console(width=150)
    with console.capture() as found:
        console.print(table)
    return found.get()


def shown() -> list[str]:
    pipeline = piped(layers())
    pipeline(rows(4)).sum().backward()
    found = [repr(pipeline), str(pipeline.layout), printed(pipeline.listing())]
    found += [printed(pipeline.skip_layout()), str(pipeline.timeline)]
    pipeline.close()
    return found


def test_what_is_shown(four_ranks: Pool) -> None:
    each = list(enumerate(four_ranks.run(shown, among=2)))
    one, other = (found for _, found in each)

    assert one[:2] == other[:2]
    assert "cpu of rank 0" in one[1]
    assert "owners=[0, 1]" in one[0]
    assert one[2:4] == other[2:4]
    assert "cpu of rank 1" in one[2]
    assert all(f"worker {rank}: F0 on stage {rank}" in found[4] for rank, found in each)


def message_of(make: Callable[[], object]) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Holding(nn.Module):
    """A layer with a generator, which another one may have too."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x


def sharing(what: str) -> nn.Sequential:
    first: nn.Module = linear()
    second: nn.Module = linear()
    if what == "buffer":
        first.register_buffer("b", torch.ones(1))
        second.register_buffer("b", first.get_buffer("b"))
    if what == "generator":
        generator = torch.Generator()
        first, second = (nn.Sequential(x, Holding(generator)) for x in (first, second))
    if what == "module":
        second = nn.Sequential(first)
    return nn.Sequential(first, linear(), second, linear())


def refusals() -> dict[str, str]:
    # One process may refuse, and end, while another would still connect.
    with mock.patch.object(build, "join_processes", side_effect=AssertionError("connected")):
        found = {
            what: message_of(partial(piped, sharing(what)))
            for what in ("buffer", "generator", "module")
        }
        found["around"] = message_of(buffer_around)
    pipeline = piped(sharing("nothing"))
    found["deepcopy"] = message_of(lambda: copy.deepcopy(pipeline))
    found["pickle"] = message_of(lambda: pickle.dumps(pipeline))
    found["assign"] = message_of(lambda: pipeline.load_state_dict({}, assign=True))
    pipeline.close()
    return found


class Around(nn.Module):
    """Has a buffer that a layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear() for _ in range(4)))
        self.register_buffer("b", torch.ones(1))
        self.layers[0].register_buffer("b", self.get_buffer("b"))


def buffer_around() -> None:
    GPipe(Around(), [2, 2], module="layers", devices=["cpu"] * 2, **processes((0, 1)))


def test_what_is_refused(four_ranks: Pool) -> None:
    found = four_ranks.run(refusals, among=2)

    for each in found:
        assert "buffer layer 0.b (cpu of rank 0) is layer 2.b (cpu of rank 1)" in each["buffer"]
        assert "(stage 0) is layer 4" in each["generator"]
        assert "module layer 0 (stage 0) is layer 2.0 (stage 1)" in each["module"]
        assert "must not share buffers" in each["around"]
        assert "over processes cannot be copied or pickled" in each["deepcopy"]
        assert "over processes cannot be copied or pickled" in each["pickle"]
        assert "ValueError: assign must be False for a pipeline over processes" in each["assign"]


class Kept(nn.Module):
    """Uses a tensor of the caller's that requires a gradient: a list hides it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.kept = [weight]
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.kept[0]
        return y


class Looped(nn.Module):
    """Loops over blocks, the ``k``-th of which uses a tensor of the caller's."""

    def __init__(self, weight: Tensor, k: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept(weight) if i == k else linear() for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branching(Looped):
    """The same, to be traced: it is no loop over the blocks alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + x


CAPTURING: dict[str, tuple[Callable[[Tensor, int], nn.Module], str | None]] = {
    "layers": (lambda weight, k: nn.Sequential(*Looped(weight, k).blocks), None),
    "loop": (Looped, "blocks"),
    "traced": (Branching, None),
}


def capture(kind: str, k: int) -> tuple[str, str]:
    """What a forward says in which a layer uses a tensor of the caller's, and the one after it."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    make, path = CAPTURING[kind]
    module = make(weight, k)
    pipeline = GPipe(module, [2, 2], module=path, devices=["cpu"] * 2, **processes((0, 1)))
    one = said(lambda: pipeline(rows(4)))
    weight.requires_grad_(False)
    two = said(lambda: pipeline(rows(4)).sum().backward())
    pipeline.close()
    return one, two


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kind", CAPTURING)
def test_tensor_that_a_layer_captures_is_refused_in_all_processes_at_once(
    four_ranks: Pool, kind: str, k: int
) -> None:
    found = four_ranks.run(capture, kind, k, among=2)

    assert all("a tensor of shape (3,) that it was not given" in one for one, _ in found), found
    assert [two for _, two in found] == ["none", "none"]

"""Transparency: a weight that layers share is one weight, on any number of devices.

Two devices require a GPU, such as one stage on the CPU and one on a GPU. Without a GPU, the weight
is given another home than the second stage's device, so that the stage uses a copy, as it would on
two devices.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.learning import Make, learn, on_every_optimizer
from tests.support.models import assert_same, gradients, perceptron, rows, step, whole_batch_loss
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

WORDS, W = 5, 3
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Head(nn.Module):
    """Scores for every word, by a weight that may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def language_model(*, sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    embedding = nn.Embedding(WORDS, W, sparse=sparse)
    layers = [nn.Linear(W, W), nn.Tanh(), nn.LayerNorm(W)]
    return nn.Sequential(embedding, *layers, Head(embedding.weight)).double()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (7, 4), generator=torch.Generator().manual_seed(seed))


Follow = Callable[..., GPipe]


@pytest.fixture(
    params=["copies on the cpu", pytest.param("two devices", marks=[pytest.mark.gpu, CUDA])]
)
def follow(request: pytest.FixtureRequest, pipe: Pipe) -> Follow:
    """Makes a pipeline of two stages, the second of which follows the first one's weight."""
    devices = ["cpu", "cuda:0" if request.param == "two devices" else "cpu"]

    def make(module: nn.Sequential) -> GPipe:
        pipeline = pipe(module, [2, len(module) - 2], devices=devices)
        pipeline.stages[1].followed = frozenset({(pipeline[-1], "weight")})
        return pipeline

    return make


@every_mode
@with_and_without_threads
def test_gradient_is_the_sum_of_both_uses(follow: Follow) -> None:
    module = language_model()
    pipeline = follow(module)

    for seed in range(2):
        batch = tokens(seed)
        assert_same(on_cpu(step(pipeline, batch)), on_cpu(step(module, batch)))


def on_cpu(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, result._asdict())


def test_gradient_arrives_once(follow: Follow) -> None:
    pipeline = follow(language_model())
    arrived: list[Tensor] = []
    weight = pipeline.get_parameter("0.weight")
    weight.register_post_accumulate_grad_hook(arrived.append)

    step(pipeline, tokens())

    assert len(arrived) == 1
    assert arrived[0] is weight


def test_training(follow: Follow) -> None:
    module = language_model()
    pipeline = follow(module)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, pipeline)]

    for seed in range(4):
        for each, optimizer in zip((module, pipeline), optimizers, strict=True):
            optimizer.zero_grad()
            step(each, tokens(seed))
            optimizer.step()

    assert len(optimizers[1].param_groups[0]["params"]) == len(list(module.parameters()))
    state = {name: value.cpu() for name, value in pipeline.state_dict().items()}
    assert_same(state, dict(module.state_dict()))
    assert torch.equal(state["0.weight"], state["4.weight"])


def test_sparse_gradient_of_the_embedding(follow: Follow) -> None:
    module = language_model(sparse=True)
    pipeline = follow(module)

    for each in (module, pipeline):
        whole_batch_loss(each(tokens())).backward()

    weight, expected = (
        pipeline.get_parameter("0.weight").grad,
        module.get_parameter("0.weight").grad,
    )
    assert weight is not None
    assert expected is not None
    assert_same(weight.to_dense(), expected.to_dense())


@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients(frozen: bool, follow: Follow) -> None:
    module = language_model().requires_grad_(not frozen)
    pipeline = follow(module)

    for value in (1.0, 2.0):
        for each in (module, pipeline):
            each.get_parameter("0.weight").data.fill_(value)
        with torch.no_grad():
            assert_same(pipeline(tokens()).cpu(), module(tokens()))


def test_frozen_weight_in_a_model_that_trains(follow: Follow) -> None:
    module = language_model()
    module.get_parameter("0.weight").requires_grad_(False)
    pipeline = follow(module)

    assert_same(on_cpu(step(pipeline, tokens())), on_cpu(step(module, tokens())))


@pytest.mark.parametrize("mode", ["always", "except_last", 1])
def test_edit_between_forward_and_recomputation_is_refused(follow: Follow) -> None:
    pipeline = follow(language_model())
    loss = whole_batch_loss(pipeline(tokens()))
    with torch.no_grad():
        pipeline.get_parameter("0.weight").mul_(2)

    with pytest.raises(RuntimeError, match="must not be edited between a forward and its"):
        loss.backward()


def test_weight_of_three_layers(follow: Follow) -> None:
    module = perceptron(6)
    module[2].weight = module[4].weight = module[0].weight
    pipeline = follow(module)
    places = {(pipeline[2], "weight"), (pipeline[4], "weight")}
    pipeline.stages[1].followed = frozenset(places)

    assert_same(on_cpu(step(pipeline, rows(7))), on_cpu(step(module, rows(7))))


def test_weight_shared_with_what_is_around_the_pipeline(pipe: Pipe) -> None:
    module = language_model()
    body, head = module[:4], module[4]
    assert isinstance(body, nn.Sequential)
    pipeline = pipe(body)
    weight = pipeline.get_parameter("0.weight")
    outside = Head(weight)
    pipeline.share([weight], "cpu")
    pipeline.stages[0].followed = frozenset({(pipeline[0], "weight")})

    for each, last in ((body, head), (pipeline, outside)):
        whole_batch_loss(last(each(tokens()))).backward()

    assert_same(gradients(pipeline), gradients(body))


@pytest.mark.gpu
@CUDA
def test_weight_lives_where_the_first_stage_is(pipe: Pipe) -> None:
    pipeline = pipe(language_model(), devices=["cuda:0", "cpu"])

    assert pipeline.get_parameter("0.weight").device == torch.device("cuda:0")
    assert pipeline.get_parameter("4.weight").device == torch.device("cuda:0")
    pipeline.share([pipeline.get_parameter("0.weight")], "cpu")
    assert pipeline.get_parameter("4.weight").device == torch.device("cpu")
    assert step(pipeline, tokens()).gradients["0.weight"].device == torch.device("cpu")


# On one device, where the parameter simply has several places.


class Twice(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(W, W)
        self.second = nn.Linear(W, W)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def shared_within_a_stage() -> nn.Sequential:
    return nn.Sequential(nn.Tanh(), nn.Linear(W, W), Twice(), nn.Tanh(), nn.Linear(W, W), nn.Tanh())


def shared_by_two_stages() -> nn.Sequential:
    module = perceptron(6)
    module[4].weight = module[0].weight
    return module


def shared_by_all_stages() -> nn.Sequential:
    module = shared_by_two_stages()
    module[2].weight = module[0].weight
    module[2].bias = module[0].bias
    return module


def shared_and_frozen_around() -> nn.Sequential:
    module = shared_by_two_stages()
    for name in ("0.bias", "2.weight", "4.bias"):
        module.get_parameter(name).requires_grad_(False)
    return module


SHARED = [
    shared_within_a_stage,
    shared_by_two_stages,
    shared_by_all_stages,
    shared_and_frozen_around,
]


@every_mode
@on_every_optimizer
@pytest.mark.parametrize("build", SHARED, ids=lambda build: build.__name__)
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cpu"]], ids=len)
def test_learning_with_a_weight_in_two_places(
    pipe: Pipe, build: Callable[[], nn.Sequential], make: Make, devices: list[str]
) -> None:
    torch.manual_seed(3)
    plain = build().double()
    pipeline = pipe(plain, stages=3, devices=devices)

    learn(plain, make)
    learn(pipeline, make)

    assert_same(pipeline.state_dict(), plain.state_dict())
    assert len(list(pipeline.parameters())) == len(list(plain.parameters()))
    assert_same(gradients(pipeline), gradients(plain))


def test_hook_on_a_weight_in_two_places_sees_one_gradient(pipe: Pipe) -> None:
    plain, seen = shared_by_all_stages(), []
    for module in (plain, pipe(plain, stages=3)):
        module.get_parameter("0.weight").register_hook(lambda gradient: seen.append(gradient))
        step(module, rows(7))

    assert_same(seen[1:], seen[:1])

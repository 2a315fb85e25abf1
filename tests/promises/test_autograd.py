"""Promise: a pipeline is one ordinary autograd node, and holds nothing longer than it must."""

import gc
import weakref
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan.recompute import Mode
from tests.support.models import Call, assert_same, gradients, perceptron, rows, step


class Watch(nn.Module):
    """Remembers weakly what went through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen.append(weakref.ref(y))
        return y.sin()  # which saves y

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


@pytest.fixture
def plain() -> nn.Sequential:
    return perceptron(4)


@pytest.fixture(params=[True, False], ids=["threads", "no threads"])
def pipeline(request: pytest.FixtureRequest, plain: nn.Sequential) -> Iterator[GPipe]:
    cpus = ["cpu", "cpu"]
    pipeline = GPipe(deepcopy(plain), [2, 2], devices=cpus, chunks=3, threads=request.param)
    yield pipeline
    pipeline.close()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it, not even itself in a circle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watching(mode: Mode) -> tuple[GPipe, Watch]:
    watch = Watch()
    module = nn.Sequential(*perceptron(2), watch, nn.Tanh())
    return GPipe(
        module, [1, 3], devices=["cpu", "cpu"], chunks=3, activation_checkpointing=mode
    ), watch


def test_gradients_without_accumulation(pipeline: GPipe, plain: nn.Sequential) -> None:
    expected = torch.autograd.grad(plain(rows(7)).exp().sum(), list(plain.parameters()))

    actual = torch.autograd.grad(pipeline(rows(7)).exp().sum(), list(pipeline.parameters()))

    assert_same(actual, expected)
    assert gradients(pipeline) == {}


def test_gradient_of_the_input_only(pipeline: GPipe, plain: nn.Sequential) -> None:
    x = rows(7)

    (actual,) = torch.autograd.grad(pipeline(x).exp().sum(), x)

    (expected,) = torch.autograd.grad(plain(x).exp().sum(), x)
    assert_same(actual, expected)
    assert gradients(pipeline) == {}


def test_gradient_of_some_parameters(pipeline: GPipe, plain: nn.Sequential) -> None:
    (actual,) = torch.autograd.grad(
        pipeline(rows(7)).exp().sum(), pipeline.get_parameter("2.weight")
    )

    (expected,) = torch.autograd.grad(plain(rows(7)).exp().sum(), plain.get_parameter("2.weight"))
    assert_same(actual, expected)


def test_backward_for_some_parameters_only(pipeline: GPipe) -> None:
    pipeline(rows(7)).sum().backward(inputs=[pipeline.get_parameter("0.bias")])

    assert set(gradients(pipeline)) == {"0.bias"}


def test_loss_on_a_part_of_the_rows(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        module(rows(7))[2:4].sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_post_accumulate_hook_fires_once_per_backward(pipeline: GPipe) -> None:
    fired: list[str] = []
    for name, parameter in pipeline.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))

    for backwards in (1, 2):
        pipeline(rows(7)).sum().backward()
        assert sorted(fired) == sorted(
            [name for name, _ in pipeline.named_parameters()] * backwards
        )


def test_hook_on_a_parameter_sees_the_whole_gradient(pipeline: GPipe, plain: nn.Sequential) -> None:
    seen: list[Tensor] = []
    pipeline.get_parameter("0.weight").register_hook(lambda gradient: seen.append(gradient.clone()))
    plain(rows(7)).sum().backward()

    pipeline(rows(7)).sum().backward()

    assert_same(seen, [plain.get_parameter("0.weight").grad])


def test_hook_on_a_parameter_changes_its_gradient(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        module.get_parameter("0.weight").register_hook(lambda gradient: gradient * 3)
        module(rows(7)).sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_hook_on_the_output_changes_every_gradient(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        y = module(rows(7))
        y.register_hook(lambda gradient: gradient * 3)
        y.sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


@pytest.mark.parametrize("chunks", [1, 3])
def test_output_that_is_edited_in_place(chunks: int) -> None:
    plain = perceptron(3)
    pipeline = GPipe(deepcopy(plain), [2, 1], devices=["cpu"], chunks=chunks)

    for module in (plain, pipeline):
        module(rows(7)).mul_(2).sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_two_forwards_before_one_backward(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        (module(rows(7)).exp().sum() * module(rows(5, seed=1)).sum()).backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_pipeline_applied_to_its_own_output(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        module(module(rows(7))).exp().sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_pipeline_in_the_middle_of_a_graph(pipeline: GPipe, plain: nn.Sequential) -> None:
    around = []
    for module in (plain, pipeline):
        before, scale = rows(7), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        (module(before.sin() * scale) * scale).exp().mean().backward()
        around.append((before.grad, scale.grad))

    assert_same(around[1], around[0])


def test_gradients_stay_apart_from_one_another(pipeline: GPipe) -> None:
    pipeline(rows(7)).sum().backward()

    memory = [gradient.untyped_storage().data_ptr() for gradient in gradients(pipeline).values()]

    assert len(set(memory)) == len(memory)


def test_differentiating_twice_is_refused(pipeline: GPipe) -> None:
    x = rows(7)

    with pytest.raises(RuntimeError, match="cannot be differentiated twice.*create_graph=True"):
        torch.autograd.grad(pipeline(x).sum(), x, create_graph=True)


# Memory.


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("mode, kept", [("always", 0), ("except_last", 1), ("never", 3), (2, 1)])
def test_activations_between_forward_and_backward(mode: Mode, kept: int) -> None:
    pipeline, watch = watching(mode)

    y = pipeline(rows(7))

    assert watch.alive == kept
    y.sum().backward()
    assert watch.alive == 0
    pipeline.close()


@pytest.mark.usefixtures("_no_collector")
def test_forward_without_a_backward_frees_its_activations() -> None:
    pipeline, watch = watching("never")

    y = pipeline(rows(7))
    del y

    assert watch.alive == 0
    pipeline.close()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("mode", ["always", "never"])
def test_forward_without_gradients_keeps_nothing(mode: Mode) -> None:
    pipeline, watch = watching(mode)

    with torch.no_grad():
        y = pipeline(rows(7))

    assert watch.alive == 0
    assert y.shape == (7, 3)
    pipeline.close()


def test_backward_that_fails_frees_the_activations() -> None:
    watch = Watch()
    module = nn.Sequential(watch, nn.Linear(3, 3).double())
    pipeline = GPipe(module, [1, 1], devices=["cpu"], chunks=3, activation_checkpointing="never")
    module[1].register_full_backward_hook(lambda *_: 1 / 0)
    loss = pipeline(rows(7)).sum()
    assert watch.alive == 3

    with pytest.raises(ZeroDivisionError):
        loss.backward()
    gc.collect()

    assert watch.alive == 0
    assert loss.requires_grad


@pytest.mark.usefixtures("_no_collector")
def test_input_is_not_kept_by_the_output(pipeline: GPipe) -> None:
    x = rows(7).detach()
    alive = weakref.ref(x)

    y = pipeline(x)
    y.sum().backward()
    del x

    assert alive() is None


@pytest.mark.usefixtures("_no_collector")
def test_steps_do_not_add_up_in_memory(pipeline: GPipe) -> None:
    def tensors() -> int:
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    counts = []
    for _ in range(30):
        pipeline(rows(7)).sum().backward()
        counts.append(tensors())

    assert counts[-1] == counts[2]


@pytest.mark.parametrize("retain", [True, False])
def test_second_backward_is_refused(pipeline: GPipe, retain: bool) -> None:
    loss = pipeline(rows(7)).sum()
    loss.backward(retain_graph=retain)

    with pytest.raises(RuntimeError, match="must run once through a pipeline's output"):
        loss.backward()


def test_backwards_of_two_outputs_in_turn_are_refused() -> None:
    module = nn.Sequential(*perceptron(2), Call(lambda x: (x, x * 2)))
    one, two = GPipe(module, [1, 2], devices=["cpu"], chunks=3)(rows(7))
    one.sum().backward()

    with pytest.raises(RuntimeError, match="must run once through a pipeline's output"):
        two.sum().backward()


def test_functional_call_leaves_the_parameters(pipeline: GPipe) -> None:
    before = list(pipeline.parameters())
    others = {n: p.detach().clone().requires_grad_() for n, p in pipeline.named_parameters()}

    torch.func.functional_call(pipeline, others, rows(7)).sum().backward()

    assert all(one is two for one, two in zip(pipeline.parameters(), before, strict=True))
    assert all(other.grad is not None for other in others.values())


def test_pipeline_within_a_pipeline() -> None:
    first, second = perceptron(2), perceptron(2)
    plain = deepcopy(nn.Sequential(first, second))
    inner = GPipe(first, [1, 1], devices=["cpu", "cpu"], chunks=3)
    outer = GPipe(nn.Sequential(inner, second), [1, 1], devices=["cpu", "cpu"], chunks=3)

    actual = step(outer, rows(7))

    assert_same(actual._asdict(), step(plain, rows(7))._asdict())
    inner.close()
    outer.close()


@pytest.mark.parametrize("mode", ["always", "never"])
def test_parameter_edited_between_forward_and_backward(plain: nn.Sequential, mode: Mode) -> None:
    pipeline = GPipe(plain, [2, 2], devices=["cpu"], activation_checkpointing=mode)
    loss = pipeline(rows(7)).sum()
    with torch.no_grad():
        pipeline.get_parameter("2.weight").mul_(2)

    with pytest.raises(RuntimeError, match="edited between a forward|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pipeline_within_checkpointing(
    pipeline: GPipe, plain: nn.Sequential, mode: Mode, use_reentrant: bool
) -> None:
    pipeline.activation_checkpointing = mode
    x = rows(7)

    checkpoint(pipeline, x, use_reentrant=use_reentrant).square().sum().backward()

    y = rows(7)
    plain(y).square().sum().backward()
    assert_same(gradients(pipeline), gradients(plain))
    assert_same(x.grad, y.grad)

"""Transparency: a step with a loss for each micro-batch meets its parameters as a plain one does.

Most tests of ``outside_gradients``, ``parameter_slots`` and ``values_on_layers`` are here.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import assert_same, gradients, perceptron, rows
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = [with_and_without_threads, pytest.mark.usefixtures("one_intra_op_thread")]


class Model(nn.Module):
    """Layers in a pipeline, or not, between others."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3).double()
        self.layers = layers
        self.after = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x)))


def pair(pipe: Pipe, layers: nn.Sequential | None = None, **options: Any) -> tuple[Model, Model]:
    """A model with a pipeline, and the plain one."""
    plain = Model(perceptron() if layers is None else layers)
    model = deepcopy(plain)
    assert isinstance(model.layers, nn.Sequential)
    model.layers = pipe(model.layers, copy=False, **{"mode": "never", **options})
    return model, plain


def check(model: Model, plain: Model, step: Callable[[Model, Tensor], Tensor]) -> None:
    """Compare the gradients of a few steps, of which the first two are searched for more."""
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    for _ in range(4):
        loss = pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model).loss
        assert loss is not None
        loss.backward()
        step(plain, rows(7)).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_parameters_are_the_same_objects(schedule: Any, pipe: Pipe) -> None:
    """Once they were shadows: keys that an optimizer's state does not have, without ``.grad``."""
    model, _ = pair(pipe)
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    pipeline.by_micro_batch(lambda x: model(x).mean(), rows(7), around=model).loss.backward()  # type: ignore[union-attr]  # there is one
    expected = [(p, p.grad) for p in model.parameters()]
    first = pipeline.stages[0].modules[0]
    found = []

    def step(x: Tensor) -> Tensor:
        found.append([(p, p.grad) for p in model.parameters()])
        output = model(x)
        found.append([(p, p.grad) for _, p in model.named_parameters()])
        assert first.weight is first._parameters["weight"]
        assert first.weight is expected[2][0]
        assert all(key is not None for key in first._parameters.values())
        return output.mean()

    pipeline.by_micro_batch(step, rows(7), around=model, schedule=schedule)

    assert len(found) == 6
    for each in found:
        assert all(p is q and a is b for (p, a), (q, b) in zip(each, expected, strict=True))
    assert all(type(module._parameters) is dict for module in model.modules())


def test_penalty_on_all_weights(pipe: Pipe) -> None:
    """Once a weight that stages share counted for each of them, and was refused."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    layers[2].weight = layers[0].weight

    def step(model: Model, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return model(x).square().mean() + 0.1 * penalty

    check(*pair(pipe, layers, balance=[1, 2]), step)


def test_hooks_see_sums(pipe: Pipe) -> None:
    model, plain = pair(pipe)
    seen: list[list[Tensor]] = []
    for each in (model, plain):
        calls: list[Tensor] = []
        seen.append(calls)
        for parameter in each.parameters():
            parameter.register_hook(lambda g, calls=calls: calls.append(g.clone()) or 2 * g)
            parameter.register_hook(lambda g: g + 1)
            parameter.register_post_accumulate_grad_hook(
                lambda p, calls=calls: calls.append(p.grad)
            )

    check(model, plain, lambda model, x: model(x).square().mean())

    assert list(map(len, seen)) == [4 * 2 * len(list(plain.parameters()))] * 2
    assert all(len(p._backward_hooks or ()) == 2 for p in model.parameters())
    total = [sum(float(g.sum()) for g in calls) for calls in seen]
    assert total[0] == pytest.approx(total[1])


def refused(
    pipe: Pipe,
    step: Callable[[Model, Tensor], Tensor],
    message: str,
    layers: nn.Sequential | None = None,
) -> None:
    """A step is refused, and the next one is right."""
    model, plain = pair(pipe, layers)
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    with pytest.raises(RuntimeError, match=message):
        pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model)
    for parameter in model.parameters():
        parameter.grad, parameter._backward_hooks = None, None
    check(model, plain, lambda model, x: model(x).square().mean())


def test_hook_registered_in_the_step(pipe: Pipe) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        model.before.weight.register_hook(lambda g: 2 * g)
        return model(x).mean()

    refused(pipe, step, "registered before training_step")


def test_gradient_accumulated_in_the_step(pipe: Pipe) -> None:
    """A plain Trainer drops it, too, but not where gradients are accumulated."""

    def step(model: Model, x: Tensor) -> Tensor:
        model.before.weight.square().sum().backward()
        return model(x).mean()

    refused(pipe, step, "must come from the loss that training_step returns")


class KeepsItsInput(nn.Linear):
    """Keeps a number that it computes from its input."""

    size: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.size = x.square().mean()
        return super().forward(x)


def test_loss_of_what_a_layer_computes_from_its_input(pipe: Pipe) -> None:
    """Its gradient would not reach the stages before."""

    def step(model: Model, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss + sum(m.size for m in model.modules() if isinstance(m, KeepsItsInput))

    layers = nn.Sequential(nn.Linear(3, 3), KeepsItsInput(3, 3)).double()
    refused(pipe, step, "got a gradient for the input of stage 1", layers)


def test_loss_of_what_a_hook_has_stored_for_earlier_micro_batches(pipe: Pipe) -> None:
    """Its graph was freed; autograd's error was raised, which told of no layer."""
    stored: list[Tensor] = []
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).double()
    layers[2].register_forward_hook(lambda layer, args, y: stored.append(y))

    def step(model: Model, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss + sum(y.square().mean() for y in stored[:-1])

    refused(pipe, step, r"loss_term\(name, value\)", layers)


def test_reentrant_checkpoint_around_the_pipeline(pipe: Pipe) -> None:
    def step(model: Model, x: Tensor, reentrant: bool = True) -> Tensor:
        h = checkpoint(model.before, x.requires_grad_(), use_reentrant=reentrant)
        return model.after(model.layers(h)).mean()

    refused(pipe, step, "Write use_reentrant=False")
    check(*pair(pipe), lambda model, x: step(model, x, False))


@pytest.mark.parametrize("computed", [True, False])
def test_other_parameters_while_the_layers_run(computed: bool, pipe: Pipe) -> None:
    """The module kept those of a later micro-batch, without a word where they were leaves."""

    def step(model: Model, x: Tensor) -> Tensor:
        weights = {name: p * 2 for name, p in model.layers.named_parameters()}
        others = weights if computed else {n: p.detach() for n, p in weights.items()}
        return model.after(functional_call(model.layers, others, (model.before(x),))).mean()

    refused(pipe, step, "parameters must stay in their modules while training_step runs")


SOURCES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "the input": lambda model, x: x,
    "before": lambda model, x: model.before.weight,
    "a stage's": lambda model, x: next(model.layers.parameters()),
    "another": lambda model, x: torch.zeros((), requires_grad=True),
}
THROUGH = "autograd.grad and backward in training_step must not go through the pipeline"


@pytest.mark.parametrize(
    "source, allow_unused",
    [
        ("another", False),
        *((name, allow) for name in SOURCES if name != "another" for allow in (0, 1)),
    ],
)
def test_gradient_through_the_pipeline(source: str, allow_unused: bool, pipe: Pipe) -> None:
    """Once autograd said that a tensor was not used in the graph, or returned None for it."""

    def step(model: Model, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        output = model(x)
        gradients = torch.autograd.grad(
            output.sum(),
            [model.after.bias, SOURCES[source](model, x)],
            create_graph=True,
            allow_unused=bool(allow_unused),
        )
        return output.mean() + sum(g.square().sum() for g in gradients if g is not None)

    refused(pipe, step, THROUGH)


def test_backward_through_the_pipeline(pipe: Pipe) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        return loss

    refused(pipe, step, THROUGH)


def test_gradient_after_the_pipeline(pipe: Pipe) -> None:
    """Of what follows, with a penalty on all weights, whose gradients are those of stages, too."""

    def step(model: Model, x: Tensor) -> Tensor:
        output = model(x)
        penalty = sum(p.square().sum() for p in model.parameters())
        [gradient] = torch.autograd.grad(output.exp().sum(), model.after.weight, create_graph=True)
        return output.mean() + gradient.sum() / len(x) + 0.1 * penalty

    check(*pair(pipe), step)


def test_gradient_within_what_is_around(pipe: Pipe) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        h = model.before(x.requires_grad_())
        [gradient] = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        return model.after(model.layers(h)).mean() + gradient.square().mean()

    check(*pair(pipe), step)


def test_gradient_penalty_without_the_pipeline(pipe: Pipe) -> None:
    """The layers run one by one, with their own parameters, while stages run them with shadows."""

    def step(model: Model, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = model.before(x)
        for layer in model.layers.children() if isinstance(model.layers, nn.Sequential) else chain:
            h = layer(h)
        [gradient] = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        return model(x).square().mean() + gradient.square().sum(1).mean()

    model, plain = pair(pipe)
    assert isinstance(model.layers, GPipe)
    chain = [model.layers[k] for k in range(len(model.layers))]
    check(model, plain, step)


class Doubled(nn.Module):
    """Calls a layer with twice its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        weight = {"weight": 2 * self.linear.weight}
        return torch.func.functional_call(self.linear, weight, (x,))


def test_layer_that_calls_another_with_other_parameters(pipe: Pipe) -> None:
    """It puts a tensor into a slot, and then a shadow: not into that of the caller's code."""
    model, plain = pair(pipe, nn.Sequential(*[Doubled() for _ in range(4)]))
    before = list(model.parameters())

    check(model, plain, lambda model, x: model(x).square().mean())

    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("mode", ["never", "always"])
def test_layer_that_is_replaced_between_steps(mode: Any, pipe: Pipe) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        return model(x).square().mean()

    model, plain = pair(pipe, nn.Sequential(*[Doubled() for _ in range(4)]), mode=mode)
    check(model, plain, step)
    other = nn.Linear(3, 3).double()
    for each in (model, plain):
        next(m for m in each.modules() if isinstance(m, Doubled)).linear = deepcopy(other)
        each.zero_grad()
    check(model, plain, step)


# Values that the step keeps on layers.


class Scaled(nn.Module):
    """Scales by what somebody else has put there."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale["here"] if isinstance(self.scale, dict) else self.scale
        return self.linear(x) * scale


def scaled_layers() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (Scaled(), nn.Tanh())])


def conditioned(
    scale_of: Callable[[Model, Tensor], Any], *, penalty: float = 0.0
) -> Callable[[Model, Tensor], Tensor]:
    """A step that sets the scale of all layers, from an embedding that the input has, too."""

    def step(model: Model, x: Tensor) -> Tensor:
        scale = scale_of(model, x)
        for layer in model.layers.modules():
            if isinstance(layer, Scaled):
                layer.scale = scale
        loss = model(x).square().mean()
        return loss + penalty * scale.square().sum() if penalty else loss

    return step


def of_a_condition(model: Model, x: Tensor) -> Tensor:
    return model.before(torch.ones(3, dtype=torch.float64)).tanh()


@pytest.mark.parametrize(
    "scale_of, penalty",
    [
        (of_a_condition, 0.0),
        (of_a_condition, 0.1),
        (lambda model, x: {"here": of_a_condition(model, x)}, 0.0),
        (lambda model, x: of_a_condition(model, x).detach(), 0.0),
        (lambda model, x: 0.5, 0.0),
    ],
    ids=["a module's output", "in the loss, too", "in a dict", "detached", "a number"],
)
@pytest.mark.parametrize("mode", ["never", "always"])
def test_value_that_is_kept_on_layers(scale_of: Any, penalty: float, mode: Any, pipe: Pipe) -> None:
    """Once the gradient of what had computed it was None."""
    check(*pair(pipe, scaled_layers(), mode=mode), conditioned(scale_of, penalty=penalty))


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda model, x: model.before(x).mean(0),
        lambda model, x: model.before(x),
        lambda model, x: model.before(x).mean(0).detach(),
        lambda model, x: {"here": x.mean(0)},
        lambda model, x: float(x.detach().mean()),
    ],
    ids=["a module's output", "by rows", "detached", "in a dict", "a number"],
)
def test_value_of_a_micro_batch_that_is_kept_on_layers(scale_of: Any, pipe: Pipe) -> None:
    """Once a stage read that of a later micro-batch."""
    model, _ = pair(pipe, scaled_layers())
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    step = conditioned(scale_of)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"got another layer 0\.scale for micro-batch 1"):
            pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model)
    check(*pair(pipe, scaled_layers()), conditioned(of_a_condition))


@pytest.mark.parametrize("name", ["0.scale", "2.training"])
def test_value_that_is_set_back_in_the_step(name: str, pipe: Pipe) -> None:
    """Stages at work on other micro-batches found the one or the other."""
    number, attribute = name.split(".")

    def step(model: Model, x: Tensor) -> Tensor:
        layer = model.layers[int(number)]  # type: ignore[index]  # a pipeline has layers, too
        setattr(layer, attribute, False)
        loss = model(x).square().mean()
        setattr(layer, attribute, True)
        return loss

    model, _ = pair(pipe, scaled_layers())
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    with pytest.raises(RuntimeError, match=rf"got another layer {name} after the call of the"):
        pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model)


@pytest.mark.parametrize("saved", [True, False])
def test_value_that_is_kept_on_layers_after_some_steps(saved: bool, pipe: Pipe) -> None:
    """Without this its gradient is written before the loop drops those of the last step."""
    model, plain = pair(pipe, scaled_layers())
    check(model, plain, lambda model, x: model(x).square().mean())
    check(model, plain, conditioned(lambda model, x: 0.5))
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    step = conditioned(of_a_condition if saved else lambda model, x: model.before.bias + 1)
    with pytest.raises(RuntimeError, match="second time" if saved else "must come from the loss"):
        pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model)


@pytest.mark.parametrize(
    "scale_of",
    [lambda _, x: float(x.detach().mean()), lambda _, x: bool((x == rows(7)[0]).all(1).any())],
    ids=["a number", "True, as others are"],
)
def test_value_of_a_micro_batch_that_is_kept_on_layers_after_some_steps(
    scale_of: Any, pipe: Pipe
) -> None:
    model, plain = pair(pipe, scaled_layers())
    check(model, plain, lambda model, x: model(x).square().mean())
    pipeline = model.layers
    assert isinstance(pipeline, GPipe)
    step = conditioned(scale_of)
    with pytest.raises(RuntimeError, match=r"got another layer 0\.scale for micro-batch 1"):
        pipeline.by_micro_batch(lambda x: step(model, x), rows(7), around=model)


def test_attributes_of_layers_that_they_set(pipe: Pipe) -> None:
    """They differ by micro-batch, and are no matter of the step."""

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.latest = x.sum().item()
            self.output = super().forward(x)
            return self.output

    layers = nn.Sequential(*[Noting(3, 3) for _ in range(4)]).double()
    check(*pair(pipe, layers), lambda model, x: model(x).square().mean())

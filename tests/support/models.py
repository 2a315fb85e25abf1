"""Layers for pipelines to run, and one step of a module to compare with another's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from lightning_gpipe.core.data.pytree import map_tensors, tree_flatten

Run = Callable[[nn.Module], list[Tensor]]  # forwards and backwards of a module; what came of them


class Step(NamedTuple):
    """What came of a forward and a backward; gradients by name, those that are None left out."""

    output: Any
    loss: Tensor
    gradients: dict[str, Tensor]
    input_gradients: list[Tensor]


def whole_batch_loss(output: Any) -> Tensor:
    """A loss that is no mean of the losses of micro-batches."""
    floating = [leaf for leaf in tree_flatten(output).leaves if _floating(leaf)]
    return sum(
        ((leaf.flatten(1).mean(1).exp().mean().log() + (leaf**2).mean()) for leaf in floating),
        start=torch.zeros((), dtype=torch.float64),
    )


def step(
    module: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor] = whole_batch_loss
) -> Step:
    """Forward, loss and backward of ``module`` on a copy of ``batch``."""
    batch = map_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)
    output = module(batch)
    loss = loss_of(output)
    loss.backward()
    inputs = [leaf.grad for leaf in tree_flatten(batch).leaves if isinstance(leaf, Tensor)]
    return Step(
        map_tensors(torch.detach, output),
        loss.detach(),
        gradients(module),
        [gradient for gradient in inputs if gradient is not None],
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, by the name of their parameter."""
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_same(actual: Any, expected: Any, *, within: float | None = None) -> None:
    """Equal in structure and, but for the order of floating-point sums, in value.

    Args:
        actual, expected: Any trees.
        within: The largest difference, as a share of the largest value of all; None for one that
            fits each value.
    """
    (found, structure), (wanted, other) = tree_flatten(actual), tree_flatten(expected)
    assert structure == other
    rtol, atol = (1e-9, 1e-11) if within is None else (0, within * _largest(wanted))
    for one, two in zip(found, wanted, strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two, rtol=rtol, atol=atol)
        else:
            assert one == two


def _largest(leaves: list[Any]) -> float:
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel())
    dense = (x.to_dense() if x.layout is not torch.strided else x for x in tensors)
    return max((float(x.detach().abs().max()) for x in dense), default=0.0)


def assert_same_step(one: nn.Module, other: nn.Module, batch: Any) -> None:
    """A step of both on ``batch`` gives the same output, loss and gradients."""
    assert_same(step(one, batch)._asdict(), step(other, batch)._asdict())


def assert_same_steps(one: nn.Module, other: nn.Module, batches: list[Any]) -> None:
    """So does a step on each of ``batches``, each beginning without gradients."""
    for batch in batches:
        one.zero_grad()
        other.zero_grad()
        assert_same_step(one, other, batch)


def assert_same_ends(run: Run, pipeline: nn.Module, plain: nn.Module) -> None:
    """Compare what came of ``run``, the gradients and the buffers."""
    expected = run(plain), gradients(plain), dict(plain.named_buffers())

    assert_same((run(pipeline), gradients(pipeline), dict(pipeline.named_buffers())), expected)


def a_loss(y: Tensor) -> Tensor:
    """A loss that is no mean over rows."""
    return y.exp().sum()


def perceptron(depth: int = 4, width: int = 3) -> nn.Sequential:
    """So many layers, Linear and Tanh by turns, in float64."""
    layers = [nn.Linear(width, width) if k % 2 == 0 else nn.Tanh() for k in range(depth)]
    return nn.Sequential(*layers).double()


class Interval(SimpleNamespace):
    """Two tensors in a class that is registered with PyTorch, but without names for them."""


register_pytree_node(
    Interval,
    lambda interval: ([interval.low, interval.high], None),
    lambda leaves, _: Interval(low=(ends := list(leaves))[0], high=ends[1]),
)


def rows(count: int, width: int = 3, *, seed: int = 7) -> Tensor:
    """An input that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64).requires_grad_()


class Call(nn.Module):
    """Runs a function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Counter(nn.Module):
    """Scales by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Fork(nn.Module):
    """One tensor in; out a tuple of a tensor and a dict with a floating and an integer one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {"residual": x, "largest": x.argmax(-1)}


class Through(nn.Module):
    """Works on the tensor of what :class:`Fork` returned, and lets the rest pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, forked: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        x, rest = forked
        return self.layer(x), rest


class Join(nn.Module):
    """Puts together what :class:`Fork` took apart."""

    def forward(self, forked: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        x, rest = forked
        return x * (1 + rest["largest"].unsqueeze(-1)) + rest["residual"]


class Attention(nn.Module):
    """Causal attention of one head, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """Holds modules by these names, and has no forward."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Residual(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Unused(nn.Linear):
    """A linear layer with a parameter that takes no part."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.unused = nn.Parameter(torch.ones(width))


class Centred(nn.Module):
    """Looks across the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    """Updates a buffer whenever it runs."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Runs:
    """What a layer noted in its forwards, recomputations included, and in its backwards.

    With slots: a recomputation does not undo what it notes here, as it does in attributes.
    """

    __slots__ = ("backward", "forward")

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []


class Recorder(nn.Module):
    """The identity, which remembers the types of what went through, in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()

    @property
    def seen(self) -> list[torch.dtype]:
        return self.runs.forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x


class Poison(nn.Module):
    """The identity, with a gradient that is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.sqrt(x - x.detach())


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad

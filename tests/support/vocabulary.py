"""The words of the grammar of models: runs of layers, and company for a tensor, each by its name.

A run is one or more layers that take and return a tensor of one shape. A stage may begin at any
layer, so values between the layers of a run cross stages too.

In most runs each row of the output depends on the same row of the input only, so that a mini-batch
and its micro-batches give the same. The others mix: they compute across rows, or update a state in
each forward, so their output depends on the micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import loss_term, whole
from tests.support.models import Attention, Call, Unused

Runs = dict[str, Callable[[], list[nn.Module]]]

T, C, W = 4, 2, 3  # the length of a sequence, the channels of an image, the width of all
# Sums in another order have other last digits. Nothing here jumps at 0, which exact sums often are,
# or divides by what may be as small as those digits.
EPS = 0.123


class Dropout(nn.Module):
    """Dropout that records its masks by the number of the draw, or uses recorded ones.

    The number is a buffer, which a forward that is run again must find as the first one did.

    Attributes:
        masks: The masks; those of another dropout, to use them.
        taken: How many to take at once; 0 to draw one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.masks: dict[int, Tensor] = {}
        self.taken = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        first, number = int(self.draws), max(1, self.taken)
        if not self.taken:
            self.masks[first] = F.dropout(torch.ones_like(x), 0.4)
        self.draws.add_(number)
        masks = [self.masks[k].to(x.device) for k in range(first, first + number)]
        return x * torch.cat(masks)


class Repeated(nn.Module):
    """Calls a layer as often as :attr:`times` says at the moment."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


class Frozen(nn.Sequential):
    """Keeps its layers in eval mode."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class Checkpointed(nn.Sequential):
    """Recomputes its layers, which draw nothing, by itself."""

    def forward(self, input: Tensor) -> Tensor:
        run = super().forward
        return checkpoint(run, input, use_reentrant=False, preserve_rng_state=False)


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Added(nn.Module):
    """Adds two parameters as views, whose gradients may be one and that of the input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = nn.Parameter(torch.ones(1, W)), nn.Parameter(torch.ones(W, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.row[0] + self.column.view(-1)


class Counter(nn.Module):
    """Computes with the number of its forwards, a buffer that it edits or replaces."""

    def __init__(self, *, edits: bool) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.edits = edits

    def forward(self, x: Tensor) -> Tensor:
        if self.edits:
            self.calls.add_(1)
        else:
            self.calls = nn.Buffer(self.calls + 1)
        return x / (1 + 0.1 * int(self.calls))


class Chooser(nn.Module):
    """Runs one layer or the other, as what it sees tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x.sum() > EPS)](x)


class PythonCounter(nn.Module):
    """Computes with the number of its forwards, which it keeps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows.append(len(x))
        return x / (1 + 0.1 * self.calls + 0.01 * sum(self.rows) / len(self.rows))


class Momentum(nn.Module):
    """Adds what a second layer makes, which follows the first one in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.slow.weight.data.lerp_(self.fast.weight.detach(), 0.1)
        with torch.no_grad():  # a backward would find the weight as it is by then
            target = self.slow(x)
        return self.fast(x) + target


class OwnNoise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def __deepcopy__(self, memo: Any) -> "OwnNoise":
        copied = OwnNoise()
        copied.generator.set_state(self.generator.get_state())
        return copied.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x + noise.to(x.device)


class Captured(nn.Module):
    """Uses what a network beside the pipeline computes, and a code in a tuple.

    Attributes:
        outside: The network, and the code.
        scale: What the network has computed.
    """

    def __init__(self) -> None:
        super().__init__()
        code = torch.randn(W, dtype=torch.float64, requires_grad=True)
        self.outside = (nn.Linear(2, W).double(), code)
        self.scale = torch.ones(W, dtype=torch.float64)

    def prepare(self) -> None:
        """Compute the scale, before a forward."""
        self.scale = self.outside[0](torch.ones(2, dtype=torch.float64)).tanh()

    @property
    def leaves(self) -> list[Tensor]:
        """What is trained outside."""
        return [*self.outside[0].parameters(), self.outside[1]]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x) + self.outside[1].to(x)


class Penalized(nn.Module):
    """Hands loss terms out, and keeps another one aside, which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        loss_term("sum", y.square().sum())
        loss_term("mean", y.square().mean(), reduction="mean")
        loss_term("weights", self.linear.weight.square().sum(), reduction="mean")
        self.kept = y.square().mean()
        return y


def _scale_gradient(layer: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else 1.5 * gradient for gradient in inputs)


def hooked() -> list[nn.Module]:
    """A layer whose hooks change what it takes and returns, and their gradients."""
    layer = nn.Linear(W, W)
    layer.register_forward_pre_hook(lambda layer, args: (args[0] * 0.5,))
    layer.register_forward_hook(lambda layer, args, y: y + 0.25)
    layer.register_full_backward_hook(_scale_gradient)
    return [layer, nn.Tanh()]


def tied() -> list[nn.Module]:
    """Two layers with one weight."""
    first, last = nn.Linear(W, W), nn.Linear(W, W)
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def spectral() -> nn.Module:
    """A layer whose power iteration has not converged."""
    layer = spectral_norm(nn.Linear(W, W))
    for buffer in layer.buffers():
        buffer.copy_(F.normalize(buffer + 0.3 * torch.randn(W), dim=0))
    return layer


def transformer() -> nn.Module:
    """Attention and a perceptron."""
    return nn.TransformerEncoderLayer(
        W, 1, 5, dropout=0.0, activation="gelu", layer_norm_eps=EPS, batch_first=True
    )


def batch_norms(norm: Any, channels: int) -> Runs:
    """Batch norms in training mode."""
    return {
        "batch norm": lambda: [norm(channels, EPS)],
        "batch norm, cumulative": lambda: [norm(channels, EPS, momentum=None)],
        "batch norm, not affine": lambda: [norm(channels, EPS, affine=False)],
        "batch norm, not tracking": lambda: [norm(channels, EPS, track_running_stats=False)],
        "batch norm, repeated": lambda: [Repeated(norm(channels, EPS))],
    }


# For tensors of any shape (rows, ..., W).
ROWWISE: Runs = {
    "linear": lambda: [nn.Linear(W, W)],
    "tanh": lambda: [nn.Tanh()],
    "scale": lambda: [Scale()],
    "parameters added": lambda: [Added()],
    "norm": lambda: [nn.LayerNorm(W, EPS)],
    "unchanged": lambda: [nn.Identity()],
    "view": lambda: [Call(lambda x: x.view_as(x))],
    "turned": lambda: [Call(lambda x: x.transpose(0, 1)), Call(lambda x: x.transpose(0, 1))],
    "edit": lambda: [nn.Linear(W, W), nn.ELU(inplace=True)],
    "edit of a view": lambda: [nn.Linear(W, W), Call(lambda x: x[:]), nn.ELU(inplace=True)],
    "detached": lambda: [Call(lambda x: x + x.detach().sin())],
    "unused parameter": lambda: [Unused(W)],
    "shared weight": tied,
    "weight norm": lambda: [weight_norm(nn.Linear(W, W))],
    "repeated": lambda: [Repeated(nn.Sequential(nn.Linear(W, W), nn.Tanh()))],
    "checkpointed": lambda: [Checkpointed(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))],
    "masked": lambda: [Dropout()],
    "captured": lambda: [Captured()],
    "loss terms": lambda: [Penalized()],
    "hooks": hooked,
}
MIXING: Runs = {
    "counter": lambda: [Counter(edits=True)],
    "counter, replaced": lambda: [Counter(edits=False)],
    "counter in Python": lambda: [PythonCounter()],
    "momentum": lambda: [Momentum()],
    "generator of its own": lambda: [OwnNoise()],
    "chooser": lambda: [Chooser()],
    "centred": lambda: [Call(lambda x: x - x.mean(0))],
    "spectral norm": lambda: [spectral()],
    "spectral norm, repeated": lambda: [Repeated(spectral())],
}
DRAWING: Runs = {  # for models that are compared with themselves only
    "dropout": lambda: [nn.Dropout(0.4)],
    "alpha dropout": lambda: [nn.AlphaDropout(0.4)],
    "random slope": lambda: [nn.RReLU()],
    "noise": lambda: [Call(lambda x: x + torch.rand_like(x))],
    "shuffled": lambda: [Call(lambda x: x[torch.randperm(2 * len(x))[: len(x)] // 2])],
}


class Kind(NamedTuple):
    """What there is for tensors of one shape."""

    shape: tuple[int, ...]
    rowwise: Runs
    mixing: Runs


FLAT_BATCH_NORMS = batch_norms(nn.BatchNorm1d, W)
KINDS = {
    "flat": Kind(
        (W,),
        ROWWISE | {"frozen batch norm": lambda: [Frozen(nn.BatchNorm1d(W, EPS))]},
        MIXING | FLAT_BATCH_NORMS,
    ),
    "sequence": Kind(
        (T, W),
        ROWWISE
        | {
            "attention": lambda: [Attention(W)],
            "transformer": lambda: [transformer()],
            "recurrent": lambda: [nn.GRU(W, W, batch_first=True), Call(itemgetter(0))],
            "convolution": lambda: [nn.Conv1d(T, T, 3, padding=1)],
            "frozen batch norm": lambda: [Frozen(nn.BatchNorm1d(T, EPS))],
        },
        MIXING | batch_norms(nn.BatchNorm1d, T),
    ),
    "image": Kind(
        (C, 4, W),
        ROWWISE
        | {
            "convolution": lambda: [nn.Conv2d(C, C, 3, padding=1), nn.ELU(inplace=True)],
            "group norm": lambda: [nn.GroupNorm(1, C, EPS)],
            "frozen batch norm": lambda: [Frozen(nn.BatchNorm2d(C, EPS))],
        },
        MIXING
        | batch_norms(nn.BatchNorm2d, C)
        | {"instance norm": lambda: [nn.InstanceNorm2d(C, EPS, track_running_stats=True)]},
    ),
}
EMBEDDINGS: Runs = {
    "embedding": lambda: [nn.Embedding(5, W)],
    "padded embedding": lambda: [nn.Embedding(5, W, padding_idx=0)],
    "sparse embedding": lambda: [nn.Embedding(5, W, sparse=True)],
}

# What goes with a tensor: its company, made of the tensor.
ROWWISE_COMPANY: dict[str, Callable[[Tensor], Any]] = {
    "same tensor": lambda x: x,
    "view": lambda x: x[..., :1],
    "detached": lambda x: x.detach(),
    "integers": lambda x: (7.7 * x).long(),
    "booleans": lambda x: x > EPS,
    "nested": lambda x: {"sin": x.sin(), "sign": ((x - EPS).sign(),)},
    "whole": lambda x: whole(torch.ones(W, device=x.device)),
    "none": lambda x: None,
    "string": lambda x: {"name": "company"},  # alone in a list it might be one per row
}
COMPANY = ROWWISE_COMPANY | {
    "mean": lambda x: x.mean(),
    "constant": lambda x: torch.tensor(2.0, device=x.device),
}


@dataclass
class Parcel:
    """A tensor and its company."""

    x: Any
    company: list[Any]


class Form(NamedTuple):
    """A tree for a tensor and its company: how to make it, and how to take it apart."""

    pack: Callable[[Any, list[Any]], Any]
    unpack: Callable[[Any], tuple[Any, list[Any]]]


FORMS = {
    "tuple": Form(lambda x, company: (x, *company), lambda tree: (tree[0], list(tree[1:]))),
    "list": Form(lambda x, company: [company, x], itemgetter(1, 0)),
    "dict": Form(lambda x, company: {"x": x, "company": company}, itemgetter("x", "company")),
    "dataclass": Form(Parcel, lambda parcel: (parcel.x, parcel.company)),
}


class Through(nn.Module):
    """Lets a layer work on a tensor that has company."""

    def __init__(self, form: Form, layer: nn.Module) -> None:
        super().__init__()
        self.form = form
        self.layer = layer

    def forward(self, tree: Any) -> Any:
        x, company = self.form.unpack(tree)
        return self.form.pack(self.layer(x), company)

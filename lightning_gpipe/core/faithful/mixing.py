"""Which dim of its input a layer of PyTorch mixes, and where it takes the rows to be.

A recurrent layer or attention mixes the time steps of a sequence. With ``batch_first=False``, the
default, their dim is dim 0, and without a batch dimension it is dim 0 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

RECOGNISED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.RNNBase,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Linear,
    nn.EmbeddingBag,
    _ConvNd,
)


class Mixed(NamedTuple):
    """What a module takes, and the dim of it that the module mixes.

    Attributes:
        shape: Its shape.
        strides: Its strides, None if it is packed.
        dim: The dim whose elements affect one another.
        rows: The dims in which rows may be.
        how: Why it is this dim.
        cure: What makes the module mix another dim, if anything does.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dim: int
    rows: tuple[int, ...]
    how: str
    cure: str = ""


def mixed_by(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mixed | None:
    """What ``module`` mixes when it is called with these arguments; None if nothing is known."""
    match module:
        case nn.MultiheadAttention():  # a query is not mixed with the others
            return _sequence(_argument(args, kwargs, 1, "key"), module.batch_first)
        case nn.TransformerEncoderLayer(self_attn=nn.MultiheadAttention(batch_first=first)):
            return _sequence(_argument(args, kwargs, 0, "src"), first)  # a fast path calls no other
        case nn.RNNBase():
            return _sequence(_argument(args, kwargs, 0, "input"), module.batch_first)
        case nn.Softmax() | nn.LogSoftmax() | nn.Softmin():
            return _normalised(_argument(args, kwargs, 0, "input"), module.dim)
    return None


def unbatched(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input of a linear layer or a convolution, if it lacks a batch dimension and does not fit.

    A vector of features of which a piece is missing, or an image without some of its channels.
    """
    match module:
        case nn.Linear():
            dims, features = 1, module.in_features
        case _ConvNd():
            dims, features = 1 + len(module.kernel_size), module.in_channels
        case _:
            return None
    x = _argument(args, kwargs, 0, "input")
    fits = not isinstance(x, Tensor) or x.dim() != dims or x.size(0) == features
    return None if fits else x


def continues(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an embedding bag is called with offsets that do not begin at its first index."""
    if not isinstance(module, nn.EmbeddingBag):
        return False
    offsets = _argument(args, kwargs, 1, "offsets")
    return isinstance(offsets, Tensor) and offsets.numel() > 0 and bool(offsets[0] != 0)


def _sequence(x: Any, batch_first: bool) -> Mixed | None:
    """A sequence, whose time steps are mixed."""
    if isinstance(x, PackedSequence) and len(x.batch_sizes):
        return Mixed((len(x.batch_sizes), int(x.batch_sizes[0])), None, 0, (1,), "packed")
    if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
        return None
    shape, strides = tuple(x.shape), x.stride()
    if x.dim() == 2:
        return Mixed(shape, strides, 0, (), "a sequence without a batch dimension")
    dim = int(batch_first)
    cure = f" If they are in dim {dim}, write batch_first={not batch_first} in the layer."
    return Mixed(shape, strides, dim, (1 - dim,), f"batch_first={batch_first}", cure)


def _normalised(x: Any, dim: int | None) -> Mixed | None:
    if not isinstance(x, Tensor) or dim is None or not -x.dim() <= dim < x.dim():
        return None
    dim %= x.dim()
    others = tuple(k for k in range(x.dim()) if k != dim)
    return Mixed(tuple(x.shape), x.stride(), dim, others, f"dim={dim}")


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], k: int, name: str) -> Any:
    return args[k] if len(args) > k else kwargs.get(name)

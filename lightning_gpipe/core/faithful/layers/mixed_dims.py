"""The dim of its input that a layer of PyTorch mixes, and the dims in which rows may be.

A recurrent layer or attention mixes the time steps of a sequence. With ``batch_first=False``, the
default, these are in dim 0, as they are without a batch dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

RECOGNISED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.RNNBase,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
    nn.EmbeddingBag,
)


class MixedDim(NamedTuple):
    """The input of a module, and the dim of it that the module mixes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None if it is packed
    dim: int  # whose elements affect one another
    rows: tuple[int, ...]  # the dims in which rows may be
    how: str  # why it is this dim
    cure: str = ""  # how to make the module mix another dim
    as_layer: bool = False  # whether an input of its layer has this shape and these strides


def mixed_by(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MixedDim | None:
    """Return what ``module`` mixes when it is called with these arguments; None if unknown."""
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


def continues(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this calls an embedding bag with offsets that do not begin at index 0."""
    if not isinstance(module, nn.EmbeddingBag):
        return False
    offsets = _argument(args, kwargs, 1, "offsets")
    return isinstance(offsets, Tensor) and offsets.numel() > 0 and bool(offsets[0] != 0)


def _sequence(x: Any, batch_first: bool) -> MixedDim | None:
    if isinstance(x, PackedSequence) and len(x.batch_sizes):
        return MixedDim((len(x.batch_sizes), int(x.batch_sizes[0])), None, 0, (1,), "packed")
    if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
        return None
    shape, strides = tuple(x.shape), x.stride()
    if x.dim() == 2:
        return MixedDim(shape, strides, 0, (), "a sequence without a batch dimension")
    dim = int(batch_first)
    cure = f" If they are in dim {dim}, write batch_first={not batch_first} in the layer."
    return MixedDim(shape, strides, dim, (1 - dim,), f"batch_first={batch_first}", cure)


def _normalised(x: Any, dim: int | None) -> MixedDim | None:
    if not isinstance(x, Tensor) or dim is None or not -x.dim() <= dim < x.dim():
        return None
    dim %= x.dim()
    others = tuple(k for k in range(x.dim()) if k != dim)
    return MixedDim(tuple(x.shape), x.stride(), dim, others, f"dim={dim}")


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], k: int, name: str) -> Any:
    return args[k] if len(args) > k else kwargs.get(name)

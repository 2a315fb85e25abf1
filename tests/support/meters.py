"""Meters of memory, and a module whose activations take 100 times what its boundaries do.

A stage keeps the input of a micro-batch that is recomputed, a *boundary*; all else that it keeps
are activations. Both are measured in two ways: by what autograd saves, and by what is allocated and
not freed yet. Micro-batches have a fixed size: a batch grows with their number m.
"""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import rows
from tests.support.waiting import awaited

R, W, K, N = 4, 2, 100, 3  # rows of a micro-batch, width of a boundary, how much wider, stages
BOUNDARY = R * W * 8  # bytes, of one micro-batch at one stage
ACTIVATIONS = K * BOUNDARY

# How many of m micro-batches keep their activations from forward to backward.
KEPT: dict[ActivationCheckpointing, Callable[[int], int]] = {
    "always": lambda m: 0,
    "except_last": lambda m: 1,
    "never": lambda m: m,
    2: lambda m: max(0, m - 2),
    30: lambda m: max(0, m - 30),
}


class Meter:
    """So many bytes now, and the most there were at once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders = Counter[int]()
        self._lock = threading.RLock()  # a holder may die in the middle of another's hold

    def hold(self, key: int, size: int, holder: object) -> None:
        """Count ``size`` bytes, once for all holders of the same ``key``, until the last dies."""
        with self._lock:
            if not self._holders[key]:
                self.now += size
                self.peak = max(self.peak, self.now)
            self._holders[key] += 1
        weakref.finalize(holder, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                self.now -= size

    def hold_storages(self, tree: Any, but: Collection[int] = ()) -> None:
        """Count the memory of all tensors in ``tree``, except scalars and the storages ``but``."""
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and x.dim() > 0:
                storage = x.untyped_storage()
                if storage._cdata not in but:
                    self.hold(storage._cdata, storage.nbytes(), storage)


class _Packed:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # its graph would refer to it for ever


def saving(meter: Meter, module: nn.Module) -> AbstractContextManager[None]:
    """Meters what a forward saves for backward, apart from parameters."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}

    def pack(x: Tensor) -> _Packed:
        packed = _Packed(x)
        if x.data_ptr() not in parameters:
            meter.hold(x.data_ptr(), x.nbytes, packed)
        return packed

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor)


class Allocating(TorchDispatchMode):
    """Meters all that operators allocate; makes the pipeline run on the calling thread."""

    def __init__(self, meter: Meter, but: list[Tensor]) -> None:
        super().__init__()
        self._meter = meter
        self._but = {x.untyped_storage()._cdata for x in but}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.hold_storages(result, self._but)
        return result


def watch(meter: Meter, module: nn.Module) -> None:
    """Meter what each layer returns, on whatever thread."""
    for layer in module.children():
        layer.register_forward_hook(lambda layer, args, output: meter.hold_storages(output))


def wide(stages: int = N) -> nn.Sequential:
    """Stages that each save ACTIVATIONS, and the BOUNDARY before them unless they are frozen."""
    layers: list[nn.Module] = []
    for _ in range(stages):
        layers += [nn.Linear(W, K * W), nn.Tanh(), nn.Linear(K * W, W)]
    return nn.Sequential(*layers).double()


def microbatches(m: int) -> Tensor:
    """An input for m micro-batches."""
    return rows(m * R, W)


def run(module: nn.Module, x: Tensor) -> None:
    """A step that leaves no gradients."""
    y = module(x)
    y.square().sum().backward()
    module.zero_grad()
    x.grad = None


def settled(meter: Meter, expected: int) -> int:
    """What is held, once workers let go of their last job, which is after they tell its end."""
    return awaited(lambda: meter.now, expected)


def census() -> tuple[int, int]:
    """The number of tensors that are alive, and the bytes of those that are no scalars."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    memory = {storage._cdata: storage.nbytes() for storage in storages}
    return len(tensors), sum(memory.values())

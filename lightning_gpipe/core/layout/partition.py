"""Cuts an nn.Sequential into partitions by a balance, and checks that it can be cut.

Cutting is sound only if the plain module runs its layers in order and does nothing else: a
subclass's own ``forward`` would be lost silently, and a layer that appears twice would be on two
stages. The layers are not copied, moved, wrapped or renamed, so the keys of the state dict do not
depend on the balance::

    module    Embedding  Block  Block  Block  Block  Norm  Linear
    balance   [       3              |    2        |      2     ]
              layers 0..2              layers 3..4   layers 5..6
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, chain, pairwise, takewhile

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gpipe.core.layout.nested import groups_of, has_own_forward, is_plain, layers_of
from lightning_gpipe.core.schedules import counted


@dataclass(frozen=True)
class Partition:
    """The layers that stage ``index`` runs, from ``first`` in the whole module.

    Their ``names`` are those in the user's model, such as ``blocks.3``; empty in a Sequential
    without groups, whose layers are known by their indices.
    """

    index: int
    first: int
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...] = ()

    @property
    def titles(self) -> list[str]:
        """The titles of the layers in errors and tables: ``layer 3``, or their names."""
        if not self.names:
            return [f"layer {k}" for k in self.indices]
        # In a nested Sequential without names of its own, ``layer 0.1``.
        return [f"layer {name}" if name[0].isdigit() else name for name in self.names]

    @property
    def titled_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.titles, self.layers, strict=True)

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self.layers))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The layers and all modules within them, each once; written for speed."""
        modules: dict[nn.Module, None] = {}
        waiting = list(self.layers)[::-1]
        while waiting:
            module = waiting.pop()
            if module not in modules:
                modules[module] = None
                if children := module._modules:
                    waiting += [child for child in children.values() if child is not None][::-1]
        return tuple(modules)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the modules, each once; by their ids, since a hash of one is slow."""
        slots = [parameter for module in self.modules for parameter in module._parameters.values()]
        return list({id(each): each for each in slots if each is not None}.values())

    @property
    def span(self) -> str:
        """The first and the last layer: ``0..2``, or by their names ``model.blocks.0..3``."""
        if not self.layers:
            return "no modules"
        names = self.names or [str(k) for k in self.indices]
        return _from_to(names[0], names[-1])

    def __str__(self) -> str:
        span = self.span
        if not span[0].isdigit():
            return span
        return f"layer {span}" if len(self.layers) == 1 else f"layers {span}"


def cut(
    module: nn.Sequential, balance: Sequence[int], name: str = "module", prefix: str = ""
) -> list[Partition]:
    """Cut the module into partitions by a balance of its layers, see :func:`layers_of`.

    Raises a TypeError or a ValueError if the module cannot be cut, or the balance does not fit it;
    calls it by ``name``, and its layers by their paths after ``prefix``.
    """
    check_sequential(module, name)
    paths = layers_of(module)
    check_balance(balance, len(paths), name)
    names = [prefix + path for path in paths] if groups_of(module) else []
    return partitions_of(list(paths.values()), names, balance)


def partitions_of(
    layers: Sequence[nn.Module], names: Sequence[str], balance: Sequence[int]
) -> list[Partition]:
    """Return the partitions of the layers by a balance that fits them; they may have no names."""
    return [
        Partition(j, first, tuple(layers[first:end]), tuple(names[first:end]))
        for j, (first, end) in enumerate(pairwise(accumulate(balance, initial=0)))
    ]


def layer_ranges(balance: Sequence[int]) -> list[range]:
    """Return the indices of the layers of each partition.

    >>> layer_ranges([2, 1])
    [range(0, 2), range(2, 3)]
    """
    return [range(first, end) for first, end in pairwise(accumulate(balance, initial=0))]


def stages_of_layers(partitions: Iterable[Partition]) -> list[int]:
    """Return the stage of each layer."""
    return [partition.index for partition in partitions for _ in partition.layers]


def _from_to(first: str, last: str) -> str:
    """Two names in one, such as ``model.layers.0..3``."""
    if first == last:
        return first
    parts = zip(first.split("."), last.split("."), strict=False)
    common = "".join(f"{a}." for a, _ in takewhile(lambda pair: pair[0] == pair[1], parts))
    return f"{first}..{last.removeprefix(common)}"


def check_sequential(module: nn.Module, name: str = "module") -> None:
    """Refuse a module that is not a plain nn.Sequential of layers that a pipeline can run."""
    kind = type(module).__qualname__
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"{name} must be an nn.Sequential, because a pipeline runs its layers one after "
            f"another: got {kind}. Put the layers to pipeline into an nn.Sequential, and call that "
            f"in forward."
        )
    if not is_plain(module):
        raise TypeError(
            f"{name} must have the forward and the __iter__ of nn.Sequential: got {kind}, "
            f"which overrides one, and stages run the layers without it. Move what it adds into a "
            f"layer, or call a plain nn.Sequential from it and pipeline that one."
        )
    if has_own_forward(module):
        raise TypeError(
            f"{name} must have the forward of nn.Sequential: got a {kind} object to which another "
            f"one was assigned, {module.forward!r}, and stages run the layers without it. Move "
            f"what it adds into a layer, and remove it with `del {name}.forward`."
        )
    check_distinct(module, name)
    check_initialised(module, name)
    layers = layers_of(module).items()
    if misfits := [f"{type(x).__name__} at {path}" for path, x in layers if not _takes_one(x)]:
        raise TypeError(
            f"each layer of {name} must take one argument, which the layer before returns: got "
            f"{', '.join(misfits)}. Leave a loss out of the layers, and compute it in "
            "training_step from the output and the targets. Give several values as one tuple."
        )


def check_distinct(module: nn.Sequential | nn.ModuleList, name: str, layer: str = "layer") -> None:
    """Refuse a container without layers, or with one that is there twice; ``layer`` is its word."""
    if not len(module):
        raise ValueError(
            f"{name} must have at least one {layer}: got an empty {type(module).__qualname__}."
        )
    if repeated := _repeated(module):
        raise ValueError(
            f"{name} must have each {layer} object only once, because a {layer} is on one stage: "
            f"got {'; '.join(repeated)}. Make an object for each {layer}; to share weights, assign "
            f"the same nn.Parameter to both."
        )


def check_initialised(module: nn.Module, name: str) -> None:
    """Refuse lazy parameters and buffers, whose shapes are not known yet."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = dict.fromkeys(path.rpartition(".")[0] or name for path, x in tensors if is_lazy(x))
    if lazy:
        raise ValueError(
            f"the parameters of {name} must be initialised before a pipeline is made: got lazy "
            f"ones in {', '.join(lazy)}. Call the model once on a small batch first: in a "
            "LightningModule, write self(torch.zeros(2, ...)) at the end of __init__."
        )


def check_balance(balance: Sequence[int], layers: int | None = None, name: str = "module") -> None:
    """Refuse a balance without a layer for each stage, or with another sum than ``layers``."""
    if not isinstance(balance, Sequence) or isinstance(balance, str):
        raise TypeError(
            f"balance must be a list of ints, the number of layers of each stage: "
            f"got balance={balance!r}. {_way_out()}"
        )
    if not all(type(size) is int for size in balance):
        kinds = ", ".join(type(size).__name__ for size in balance)
        raise TypeError(
            f"balance must hold ints only, the number of layers of each stage: "
            f"got balance={balance!r} (types {kinds}). Write each as a plain int."
        )
    owner = "" if layers is None else f" for the {layers} layers of {name}"
    if not balance or min(balance) < 1:
        raise ValueError(
            f"balance must give every stage at least one layer, and have at least one stage: "
            f"got balance={list(balance)}{owner}. {_way_out()}"
        )
    if layers is None:
        return
    check_enough_layers(layers, len(balance), name)
    if sum(balance) != layers:
        raise ValueError(
            f"balance must add up to the number of layers: got balance={list(balance)} "
            f"(sum {sum(balance)}){owner}. {_way_out(len(balance))}"
        )


def check_even(stages: int, devices: int, way_out: str) -> None:
    """Refuse a number of devices that does not divide the stages; ``way_out`` says what to do."""
    if not devices or stages % devices:
        raise ValueError(
            "the number of stages must be a multiple of the number of devices, so that each device "
            f"has equally many: got {counted(stages, 'stage')} for {counted(devices, 'device')}. "
            f"{way_out}"
        )


def check_enough_layers(layers: int, stages: int, name: str = "module") -> None:
    """Refuse a number of stages that is less than 1, or greater than the number of layers."""
    if not 1 <= stages <= layers:
        raise ValueError(
            "there must be at least one stage, and at least one layer for each: got "
            f"{counted(stages, 'stage')} for the {counted(layers, 'layer')} of {name}. Use fewer "
            "stages (fewer devices, if there is one stage per device), or split the layers into "
            "smaller ones."
        )


def _repeated(module: nn.Sequential | nn.ModuleList) -> list[str]:
    """Name the indices of each layer object that has several: ``ReLU at 1 and 3``."""
    indices_of: dict[nn.Module, list[str]] = {}
    for k, layer in enumerate(module):
        indices_of.setdefault(layer, []).append(str(k))
    return [
        f"{type(layer).__qualname__} at {' and '.join(indices)}"
        for layer, indices in indices_of.items()
        if len(indices) > 1
    ]


def _takes_one(layer: nn.Module) -> bool:
    """Return False if a layer cannot be called with one argument, so far as that is known."""
    if layer._forward_pre_hooks or type(layer).__call__ is not nn.Module.__call__:
        return True  # they may give it others
    try:
        signature(layer.forward, follow_wrapped=False).bind(None)
    except ValueError:  # a function without a signature, as one in C
        return True
    except TypeError:
        return False
    return True


def _way_out(stages: int | None = None) -> str:
    call = f"balance_by_parameters(module, stages={stages or 'n'})"
    return f"{call} finds one that fits, and in a Trainer balance='parameters' does."

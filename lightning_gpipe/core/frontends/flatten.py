"""Flattens a model whose layers are in groups into one nn.Sequential, with the same names.

A pipeline cuts an nn.Sequential between its layers and nowhere else. Many models have few layers by
that count: a residual network is four groups of blocks between a stem and a head, and their order
is in the code of a ``forward``. To rewrite such a model as a Sequential would rename its weights,
and published checkpoints would no longer load.

Here the layers stay the same objects, and the path of each in the old model is its name in the new
one, with dots::

    ResNet   conv1   bn1   relu   layer1 ( 0         1 )       ...   fc
    flat     conv1   bn1   relu   layer1.0    layer1.1         ...   fc

So the state dict has the same keys, and loads both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_gpipe.core.plan import has_own_forward, is_plain


def flatten(
    module: nn.Module, order: Sequence[str | Callable[[Any], Any]] | None = None
) -> nn.Sequential:
    """One nn.Sequential of the layers of ``module``, with the same state dict.

    Example::

        flatten(nn.Sequential(nn.Sequential(a, b), c))  # layers "0.0", "0.1" and "1"

        flatten(
            torchvision.models.resnet50(),
            ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool",
             nn.Flatten(1), "fc"],
        )

    Sequentials are flattened at any depth. A Sequential with a ``forward``, parameters or hooks of
    its own is not: it stays one layer.

    Args:
        module: The model. It is not changed, and shares its layers with what is returned.
        order: What the model's ``forward`` runs, in order: the names of modules in it, such as
            ``"layer1"`` or ``"features.stem"``, and functions or modules without parameters. It
            must run them one after another, each on what the one before returned. None for an
            nn.Sequential.

    Raises:
        TypeError: If ``order`` is missing, or has an entry that is neither a name nor a function.
        ValueError: If ``order`` has a name that does not exist, has a module twice, or leaves out
            parameters; or if the model itself has hooks, which would be lost.
    """
    if order is None:
        if not _only_runs_its_layers(module):
            raise TypeError(
                "flatten(module) must be given an order, unless the module is a plain "
                f"nn.Sequential: got {type(module).__name__}. Give the order in which its forward "
                'runs its children, as flatten(module, ["conv1", "layer1", nn.Flatten(1), "fc"]).'
            )
        order = list(module._modules)
    if hooks := _hooks(module):
        raise ValueError(
            f"hooks on {type(module).__name__} itself would be lost: got {', '.join(hooks)}. "
            "Register them on what flatten returns."
        )
    layers = _layers(module, order)
    _check_complete(module, layers)
    flat = FlatSequential(layers)
    flat.training = module.training
    return flat


class FlatSequential(nn.Sequential):
    """An nn.Sequential with dots in the names of its layers.

    The prefix of several names is an attribute: ``flat.layer1`` is a FlatSequential of all layers
    whose names begin with ``layer1.``, so that ``get_submodule("layer1.0.conv1")`` returns the same
    module as in the model that was flattened.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            start, layers = f"{name}.", self.__dict__.get("_modules", {})  # none before __init__
            found = {k.removeprefix(start): v for k, v in layers.items() if k.startswith(start)}
            if not found:
                raise
            return FlatSequential(found)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # nn.Module takes what a key has before its first dot as the name of a child.
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
        )
        ours = tuple(f"{prefix}{name}." for name in self._modules)
        unexpected_keys += [key for key in unexpected if not key.startswith(ours)]


class Function(nn.Module):
    """Runs a function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def _layers(module: nn.Module, order: Sequence[str | Callable[[Any], Any]]) -> dict[str, nn.Module]:
    """The layers by name; those that are not the model's are named by their index in ``order``."""
    known = dict(module.named_modules(remove_duplicate=False))
    names = [entry for entry in order if isinstance(entry, str)]
    if unknown := [name for name in names if not name or name not in known]:
        children = ", ".join(map(repr, module._modules))
        raise ValueError(
            f"order must name modules in {type(module).__name__}: got {unknown}, where there is "
            f"none. It holds {children}."
        )
    found: list[tuple[str, nn.Module]] = []
    for k, entry in enumerate(order):
        if isinstance(entry, str):
            found += _unfold(entry, known[entry])
        else:
            found.append((f"order[{k}]", _unnamed(entry, k)))
    layers = dict(found)
    if repeated := [name for k, (name, _) in enumerate(found) if name in dict(found[:k])]:
        raise ValueError(
            f"order must have each module once: got {repeated} again. For a module without "
            "parameters, such as nn.ReLU, write a new one the second time."
        )
    return layers


def _unfold(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not _only_runs_its_layers(module):
        yield name, module
        return
    for key, layer in module._modules.items():
        assert layer is not None  # an nn.Sequential could not run it
        yield from _unfold(f"{name}.{key}", layer)


def _unnamed(entry: Any, k: int) -> nn.Module:
    """The entry at index k of ``order``, as a layer."""
    if isinstance(entry, nn.Module):
        if any(True for _ in _tensors(entry)):
            raise ValueError(
                f"order must give modules with parameters or buffers by name: got order[{k}], a "
                f"{type(entry).__name__}. Write the name that it has in the model."
            )
        return entry
    if isinstance(entry, type) or not callable(entry):
        raise TypeError(
            "order must hold names of modules, functions, and modules without parameters: got "
            f"order[{k}]={entry!r}, a {type(entry).__name__}."
        )
    return Function(entry)


def _only_runs_its_layers(module: nn.Module) -> bool:
    """Whether this is an nn.Sequential that could be replaced by its layers."""
    return (
        is_plain(module)
        and not has_own_forward(module)
        and not module._parameters
        and not module._buffers
        and not _hooks(module)
    )


def _hooks(module: nn.Module) -> list[str]:
    return [key for key, value in vars(module).items() if key.endswith("_hooks") and value]


def _tensors(module: nn.Module) -> Iterator[str]:
    """The names of all parameters and buffers; all names of one that has several."""
    for name, _ in module.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in module.named_buffers(remove_duplicate=False):
        yield name


def _check_complete(module: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise if a parameter or a buffer is in none of the layers."""
    starts = tuple(f"{name}." for name in layers)
    left = [name for name in _tensors(module) if not name.startswith(starts)]
    if left:
        owners = dict.fromkeys(_outermost(name, starts) for name in left)
        raise ValueError(
            f"order must have all modules with parameters or buffers in {type(module).__name__}: "
            f"it leaves out {', '.join(map(repr, owners))}. Add them, or their weights would be "
            "missing in checkpoints."
        )


def _outermost(name: str, starts: tuple[str, ...]) -> str:
    """The shortest path on the way to a parameter that contains none of the layers."""
    parts = name.split(".")
    paths = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return next(path for path in paths if not any(s.startswith(f"{path}.") for s in starts))

"""Decorators for layers that stash a tensor for a later layer, or pop one.

One layer *stashes* a tensor under a name and another *pops* it, past the layers between. The syntax
is torchgpipe's, so its models run here: ``forward`` is a generator that yields stashes
and pops. :func:`with_skips` makes such a generator of a plain forward.

The table of skip tensors is thread-local. In a plain nn.Sequential a tensor stays in it from stash
to pop. A pipeline uses a table for each micro-batch and stage, and sends the tensors that remain in
it to the stages that pop them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, uuid4

from torch import Tensor, nn

from lightning_gpipe.core.programs import RouteName, SkipName

Table = dict[RouteName, Any]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.table: Table = {}


_threads = _Threads()


def in_flight() -> Table:
    """Return the calling thread's skip tensors, by name."""
    return _threads.table


class using_table:
    """Let layers stash to and pop from ``table`` in a ``with`` block."""

    # A class takes half the time of a generator; it is entered for every action.

    def __init__(self, table: Table) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._before = _threads.table
        _threads.table = self._table

    def __exit__(self, *_: object) -> None:
        _threads.table = self._before


Layer = TypeVar("Layer", bound=type[nn.Module])
M = TypeVar("M", bound=nn.Module)

_DECLARATION = "_gpipe_skips"


@dataclass(frozen=True)
class Namespace:
    """Separates the names in one part of a model from the same names in another part.

    Example::

        for _ in range(4):
            ns = Namespace()
            layers += [Stash().isolate(ns), nn.Tanh(), Pop().isolate(ns)]

    Copies of a namespace, as in a copied model, are equal to it.
    """

    id: UUID = field(default_factory=uuid4, init=False)


class stash(NamedTuple):  # reads as a verb: `yield stash("x", t)`
    """A request that a forward yields to keep a tensor, or None, for a later layer."""

    name: str
    tensor: Tensor | None


class pop(NamedTuple):
    """A request that a forward yields to get, and remove, a tensor that was stashed."""

    name: str


class Declaration(NamedTuple):
    """The names of the skip tensors that a class of layers stashes and pops."""

    stash: tuple[str, ...]
    pop: tuple[str, ...]

    @property
    def requests(self) -> set[tuple[str, str]]:
        """The requests that each forward makes, by their verbs and names."""
        return {("stash", n) for n in self.stash} | {("pop", n) for n in self.pop}


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Decorate a layer whose ``forward`` yields its stashes and pops.

    Example::

        @skippable(stash=["residual"])
        class Enter(nn.Module):
            def forward(self, x):
                yield stash("residual", x)
                return self.layer(x)

        @skippable(pop=["residual"])
        class Leave(nn.Module):
            def forward(self, x):
                residual = yield pop("residual")
                return x + residual

    The same class is returned, with a method added: ``isolate(namespace, only=None)`` moves its
    names, or those in ``only``, into a :class:`Namespace` and returns the layer.

    Args:
        stash: The names that each forward stashes, all of them.
        pop: The names that each forward pops, all of them.

    Raises:
        TypeError: If a string is given instead of a list of names, or a name is not a string.
    """
    declaration = Declaration(_names(stash, "stash"), _names(pop, "pop"))

    def decorate(layer: Layer) -> Layer:
        original = layer.forward

        @wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if isinstance(result, Generator):
                return _run_generator(self, result)
            _check_all_done(self, declaration.requests)
            return result

        layer.forward = forward
        setattr(layer, _DECLARATION, declaration)
        layer.isolate = isolate  # type: ignore[attr-defined]  # this adds it
        return layer

    return decorate


def with_skips(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Decorate a layer whose ``forward`` takes its pops as arguments and returns its stashes.

    Example::

        @with_skips(stash=["residual"])
        class Enter(nn.Module):
            def forward(self, x):
                return self.layer(x), {"residual": x}

        @with_skips(pop=["residual"])
        class Leave(nn.Module):
            def forward(self, x, residual):
                return x + residual

    The pops follow the input in the order of ``pop``. A layer that stashes returns a pair of its
    output and a dict. Otherwise as :func:`skippable`.
    """
    stashed, popped = _names(stash, "stash"), _names(pop, "pop")

    def decorate(layer: Layer) -> Layer:
        original = layer.forward

        @wraps(original)
        def forward(self: nn.Module, x: Any) -> Generator[Any, Tensor | None, Any]:
            skips = []
            for name in popped:
                skips.append((yield _Pop(name)))
            result = original(self, x, *skips)
            if not stashed:
                return result
            match result:
                case (output, dict() as tensors):
                    for name, tensor in tensors.items():
                        yield _Stash(name, tensor)
                    return output
            raise TypeError(
                f"the forward of {type(self).__name__} must return (output, stashes), where "
                f"stashes is a dict of tensors by name: got {type(result).__name__}."
            )

        layer.forward = forward
        return skippable(stashed, popped)(layer)

    return decorate


_Stash, _Pop = stash, pop  # the decorators' arguments have their names


def declaration_of(module: nn.Module) -> Declaration | None:
    """Return the declaration of the module's class, or None if it is not skippable."""
    return getattr(type(module), _DECLARATION, None)


def full_name(module: nn.Module, name: str) -> SkipName:
    """Return the name of a skip tensor with the namespace that the module was isolated into."""
    namespace = module.__dict__.get("_namespaces", {}).get(name)
    return SkipName(None if namespace is None else namespace.id, name)


def isolate(layer: M, namespace: Namespace, *, only: Iterable[str] | None = None) -> M:
    """Move the names of a skippable layer, or those in ``only``, into a namespace.

    Returns the layer. It is the layer's own method of that name, with types.

    Raises:
        TypeError: If the layer is not skippable, or ``namespace`` is not a Namespace.
        ValueError: If ``only`` has a name that the layer does not declare.
    """
    declaration = declaration_of(layer)
    if declaration is None or not isinstance(namespace, Namespace):
        raise TypeError(
            f"a skippable layer is isolated into a Namespace: got {type(layer).__name__} and "
            f"{namespace!r}. Decorate its class by @skippable, and pass Namespace()."
        )
    declared = (*declaration.stash, *declaration.pop)
    chosen = declared if only is None else _names(only, "only")
    if unknown := [name for name in chosen if name not in declared]:
        raise ValueError(
            f"only must name what {type(layer).__name__} stashes or pops: got {unknown}. It "
            f"declares stash={list(declaration.stash)} and pop={list(declaration.pop)}."
        )
    namespaces = layer.__dict__.get("_namespaces", {})
    layer.__dict__["_namespaces"] = {**namespaces, **dict.fromkeys(chosen, namespace)}
    return layer


def _run_generator(layer: nn.Module, forward: Generator[Any, Tensor | None, Any]) -> Any:
    declaration = declaration_of(layer)
    assert declaration is not None
    skips, missing, kind = in_flight(), declaration.requests, type(layer).__name__
    answer: Tensor | None = None
    while True:
        try:
            request = forward.send(answer)
        except StopIteration as end:
            _check_all_done(layer, missing)
            return end.value
        answer = None
        match request:
            case stash(name, tensor):
                _check_declared(layer, "stash", name, declaration.stash)
                if tensor is not None and not isinstance(tensor, Tensor):
                    raise TypeError(
                        f"a skip connection carries a tensor or None: got {type(tensor).__name__} "
                        f"for {name!r} in {kind}. Stash several tensors under a name each."
                    )
                skips[full_name(layer, name)] = tensor
                missing.discard(("stash", name))
            case pop(name):
                _check_declared(layer, "pop", name, declaration.pop)
                full = full_name(layer, name)
                if full not in skips:
                    raise RuntimeError(
                        f"{full} must be stashed before {kind} pops it: no layer did. "
                        "verify_skippables(module) checks all declarations of a model."
                    )
                answer = skips.pop(full)
                missing.discard(("pop", name))
            case _:
                raise TypeError(
                    f"the forward of {kind} must yield stash(name, tensor) or pop(name): got "
                    f"{type(request).__name__}. Return the output."
                )


def _check_declared(layer: nn.Module, verb: str, name: str, declared: tuple[str, ...]) -> None:
    if name not in declared:
        raise RuntimeError(
            f"{type(layer).__name__} must declare all that it stashes and pops: got "
            f"{verb}({name!r}) in its forward, and {verb}={list(declared)} on the class. "
            f"Add it to @skippable({verb}=...)."
        )


def _check_all_done(layer: nn.Module, missing: set[tuple[str, str]]) -> None:
    if missing:
        requests = ", ".join(f"{verb}({name!r})" for verb, name in sorted(missing))
        raise RuntimeError(
            f"{type(layer).__name__} must stash and pop all that it declares: its forward ended "
            f"without {requests}. To pass nothing on, stash None."
        )


def _names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names: got {names!r}. Write [{names!r}].")
    listed = tuple(names)
    if wrong := [name for name in listed if not isinstance(name, str)]:
        raise TypeError(f"{argument} must be a list of names, as strings: got {wrong}.")
    return tuple(dict.fromkeys(listed))

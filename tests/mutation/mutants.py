"""Finds the effects in a module, and writes the module without one of them.

An effect that is taken out leaves ``pass`` in its place, a context manager leaves the body of its
``with`` block, and what is undone in ``finally`` is undone only if there was no error.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from tests.mutation.declaration import BUILDING, STREAMS, kind_of, makes_manager

Block = list[ast.stmt]

# What an instrumented module calls with the index of an effect just before it.
PROBE = "__reached__"
_IMPORT_PROBE = f"from tests.mutation.probe import reached as {PROBE}"


@dataclass(frozen=True)
class Mutant:
    """One effect that is taken out.

    Attributes:
        module: The path of the module, from the root of the repository.
        where: The function, such as ``Journal.undo``.
        effect: Its source on one line.
        kind: What it does, see ``declaration.KINDS``.
        nth: How many effects with the same source come before it in the function.
        line: Its line in the module; it may change without the mutant becoming another.
        index: Its index among the effects of the module.
    """

    module: str
    where: str
    effect: str
    kind: str
    nth: int
    line: int
    index: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What stays when lines move."""
        return self.module, self.where, self.effect, self.nth

    @property
    def on_streams(self) -> bool:
        """Whether it concerns CUDA streams."""
        return STREAMS.search(self.effect) is not None

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.where}: {self.effect}"


class _Effect(NamedTuple):
    """One effect in a syntax tree."""

    where: str
    kind: str
    source: str
    statement: ast.stmt  # which it is, or in which it is
    block: Block  # of the statement
    remove: Callable[[], None]


def mutants_of(module: str, source: str) -> list[Mutant]:
    """The mutants of a module, in the order of its lines."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for index, each in enumerate(_effects(ast.parse(source))):
        nth = seen[each.where, each.source]
        seen[each.where, each.source] += 1
        line = each.statement.lineno
        found.append(Mutant(module, each.where, each.source, each.kind, nth, line, index))
    return found


def without(source: str, index: int) -> str:
    """The source of a module without the effect of this index."""
    tree = ast.parse(source)
    _effects(tree)[index].remove()
    return ast.unparse(ast.fix_missing_locations(tree))


def instrumented(source: str, first: int) -> str:
    """The source of a module that reports its effects as they are reached, counted from first."""
    tree = ast.parse(source)
    for index, each in enumerate(_effects(tree), start=first):
        probe = ast.parse(f"{PROBE}({index})").body[0]
        each.block.insert(each.block.index(each.statement), probe)
    tree.body.insert(_first_line(tree), ast.parse(_IMPORT_PROBE).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _first_line(tree: ast.Module) -> int:
    """Where an import may stand: after the docstring and the imports from ``__future__``."""
    futures = [
        k
        for k, each in enumerate(tree.body)
        if isinstance(each, ast.ImportFrom) and each.module == "__future__"
    ]
    return futures[-1] + 1 if futures else int(ast.get_docstring(tree) is not None)


def _effects(tree: ast.Module) -> list[_Effect]:
    """All effects, before any is taken out."""
    return list(_within(tree.body, ()))


def _within(block: Block, where: tuple[str, ...]) -> Iterator[_Effect]:
    for statement in block:
        function = ".".join(where)
        if where:
            yield from _of(statement, block, function)
        inner = where
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            inner = (*where, statement.name)
        for sub_block in _blocks_of(statement):
            yield from _within(sub_block, inner)


def _blocks_of(statement: ast.stmt) -> Iterator[Block]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", []) + getattr(statement, "cases", []):
        yield handler.body


def _of(statement: ast.stmt, block: Block, where: str) -> Iterator[_Effect]:
    """The effects of a statement itself, without those of the blocks in it."""
    removals = chain(
        _alone(statement, block, constructs=where.endswith("__init__")),
        _held(statement, block),
        _undone(statement, block),
        _listed(statement),
    )
    for kind, source, remove in removals:
        yield _Effect(where, kind, " ".join(source.split()), statement, block, remove)


_Removal = tuple[str, str, Callable[[], None]]  # the kind, the source, and what takes it out


def _alone(statement: ast.stmt, block: Block, *, constructs: bool) -> Iterator[_Removal]:
    """The statement, if it is an effect."""
    name = _effect_of(statement, constructs=constructs)
    if name is not None:
        remove = partial(_replace, block, statement, [ast.Pass()])
        yield kind_of(name), ast.unparse(statement), remove


def _held(statement: ast.stmt, block: Block) -> Iterator[_Removal]:
    """The context managers of a ``with`` statement, but those whose value it names."""
    if isinstance(statement, ast.With):
        for item in statement.items:
            if item.optional_vars is None:
                remove = partial(_take_item, block, statement, item)
                yield "holds", f"with {ast.unparse(item)}", remove


def _undone(statement: ast.stmt, block: Block) -> Iterator[_Removal]:
    """What is undone in ``finally``, after an error."""
    if isinstance(statement, ast.Try) and statement.finalbody:
        source = "; ".join(map(ast.unparse, statement.finalbody))
        yield "undoes", f"finally: {source}", partial(_take_finally, block, statement)


def _listed(statement: ast.stmt) -> Iterator[_Removal]:
    """The context managers in lists."""
    nodes = () if any(_blocks_of(statement)) else ast.walk(statement)
    for managers in (node for node in nodes if isinstance(node, ast.List)):
        for each in managers.elts:
            if isinstance(each, ast.Call) and makes_manager(_name_of(each.func)):
                yield "holds", ast.unparse(each), partial(managers.elts.remove, each)


def _effect_of(statement: ast.stmt, *, constructs: bool) -> str | None:
    """The name of what a statement is there for; None if it only computes or declares."""
    match statement:
        case ast.Raise():
            return "raise"
        case ast.Delete():
            return "delete"
        case ast.Expr(ast.Call(func=function) as call):
            computes = _builds(function) and not _collects_manager(call)
            return None if computes else _name_of(function)
        case ast.Expr(ast.Yield(ast.Call(func=function))):
            return _name_of(function)
        case ast.Assign(targets=targets) if not constructs:
            return next(filter(None, map(_kept_in, targets)), None)
        case ast.AnnAssign(target=target, value=ast.expr()) if not constructs:
            return _kept_in(target)
        case ast.AugAssign(target=target) if not constructs:
            return _kept_in(target) or ("add" if _collects_manager(statement) else None)
    return None


def _kept_in(target: ast.expr) -> str | None:
    """The name of the attribute in which a value outlives the function, if there is one."""
    match target:
        case ast.Attribute():
            return "assign"
        case ast.Subscript(value=ast.Attribute()):
            return "assign"
        case ast.Tuple(elts=elements):
            return next(filter(None, map(_kept_in, elements)), None)
    return None


def _builds(function: ast.expr) -> bool:
    """Whether it is a method of a container in a local variable."""
    match function:
        case ast.Attribute(value=ast.Name(), attr=name):
            return name in BUILDING.split()
        case ast.Attribute(value=ast.Call(func=inner)):
            return _builds(inner)
    return False


def _collects_manager(node: ast.AST) -> bool:
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(makes_manager(_name_of(each.func)) for each in calls)


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _replace(block: Block, old: ast.stmt, new: Sequence[ast.stmt]) -> None:
    k = block.index(old)
    block[k : k + 1] = new


def _take_item(block: Block, statement: ast.With, item: ast.withitem) -> None:
    statement.items.remove(item)
    if not statement.items:
        _replace(block, statement, statement.body)


def _take_finally(block: Block, statement: ast.Try) -> None:
    last, statement.finalbody = statement.finalbody, []
    _replace(block, statement, [*([statement] if statement.handlers else statement.body), *last])

"""A LightningCLI in which ``strategy: gpipe`` is registered."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

_OPTION = "--trainer.strategy"
_NAME, _CLASS = "gpipe", "lightning_gpipe.GPipeStrategy"


class _CLI(LightningCLI):
    """Takes ``--trainer.strategy.chunks=2`` where the strategy is given as ``gpipe``.

    The parser takes arguments of a class, and ``gpipe`` is a name that a Trainer knows.
    """

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None:
            sys.argv[1:] = _with_class(parser, sys.argv[1:])
        elif isinstance(args, list):
            args = _with_class(parser, args)
        super().parse_arguments(parser, args)


def main(args: ArgsType = None) -> LightningCLI:
    """Run a LightningCLI whose model and data are given by ``class_path``.

    Importing this package registers the strategy, so that ``strategy: gpipe`` works in a
    configuration without any code of the user's.

    Args:
        args: What to parse instead of the command line.
    """
    return _CLI(subclass_mode_model=True, subclass_mode_data=True, args=args)


def _with_class(parser: LightningArgumentParser, given: list[str]) -> list[str]:
    """The arguments, with the class in the place of the name ``gpipe`` if that was given."""
    if not any(map(_is_nested, given)):
        return given
    pairs = zip(["", *given], given, strict=False)
    others = [each for before, each in pairs if not _left_out(before, each)]
    if _name_in(parser.parse_args(others)) != _NAME:
        return given
    first = next(k for k, each in enumerate(given) if _is_nested(each))
    return [*given[:first], f"{_OPTION}={_CLASS}", *given[first:]]


def _name_in(config: Any) -> Any:
    """The strategy that a configuration of any subcommand has."""
    of_command = config.get(config.get("subcommand") or "", config)
    return of_command.get("trainer.strategy")


def _left_out(before: str, argument: str) -> bool:
    """Whether an argument, or the one before whose value it is, does not name the strategy."""
    value = _is_nested(before) and "=" not in before
    return value or _is_nested(argument) or argument.startswith("--print_config")


def _is_nested(argument: str) -> bool:
    """Whether this is an argument of the strategy: ``--trainer.strategy.chunks=2``."""
    return argument.startswith(f"{_OPTION}.")

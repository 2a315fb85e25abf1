"""The commands of ``python -m lightning_gpipe``: ``fit``, ``check`` and ``plan``.

Each command is a function of its arguments, a list of strings.
"""

from lightning_gpipe.commands.check import check
from lightning_gpipe.commands.fit import main
from lightning_gpipe.commands.plan import plan_command

__all__ = ["check", "main", "plan_command"]

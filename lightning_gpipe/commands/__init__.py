"""The command ``lightning-gpipe`` (``python -m lightning_gpipe``): ``fit``, ``check``, ``plan``."""

import gc
import os
import sys
import warnings

from lightning_gpipe.commands.check import check
from lightning_gpipe.commands.fit import main
from lightning_gpipe.commands.plan import plan_command

__all__ = ["check", "main", "plan_command", "run"]

_OF_LIGHTNING = ("fit", "validate", "test", "predict")
_HELP = """\
usage: lightning-gpipe COMMAND ...

  fit, validate, test, predict   LightningCLI, in which the strategy is registered as gpipe
  check   shows how a model would run as a pipeline, or why it cannot
  plan    chooses stages, micro-batches and a schedule for devices, which need not be there

Each has its own help, such as: lightning-gpipe plan --help
Without an installation, write python -m lightning_gpipe instead of lightning-gpipe.
"""


def run() -> None:
    """Run the command line of this process, and end it."""
    gc.freeze()  # what is imported is no garbage, and half a second in each search for it
    # A console script has its own folder there, and not the user's modules as `python -m` has.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    name, *arguments = sys.argv[1:] or ["--help"]
    commands = {"check": check, "plan": plan_command}
    command = commands.get(name)
    if name in ("-h", "--help"):
        print(_HELP, end="")
    elif command is None:
        if name not in _OF_LIGHTNING and not name.startswith("-"):
            known = ", ".join([*_OF_LIGHTNING, *commands])
            sys.exit(f"the command must be one of {known}: got {name}. Its help is --help.")
        main()
    else:
        # LightningCLI warns of the arguments that it is not given. They stay, for processes that
        # start_method="popen" starts with them.
        warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended", UserWarning)
        status = command(arguments or ["--help"])
        gc.freeze()  # nor is what ends with the process
        sys.exit(status)

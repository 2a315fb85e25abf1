"""``python -m lightning_gpipe fit --config config.yaml``; or ``check``, or ``plan``."""

import sys

from lightning_gpipe.commands import check, main, plan_command

command = {"check": check, "plan": plan_command}.get("".join(sys.argv[1:2]))
if command is None:
    main()
else:
    arguments = sys.argv[2:]
    del sys.argv[1:]  # or LightningCLI, which the command gives its own, warns that it ignores them
    sys.exit(command(arguments))

"""``python -m lightning_gpipe fit --config config.yaml``; or ``check``, or ``plan``."""

import sys

from lightning_gpipe.check import check
from lightning_gpipe.cli import main
from lightning_gpipe.planning import plan_command

if sys.argv[1:2] == ["check"]:
    sys.exit(check(sys.argv[2:]))
if sys.argv[1:2] == ["plan"]:
    sys.exit(plan_command(sys.argv[2:]))
main()

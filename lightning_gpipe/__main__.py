"""``python -m lightning_gpipe fit --config config.yaml``, or ``check`` in the place of ``fit``."""

import sys

from lightning_gpipe.check import check
from lightning_gpipe.cli import main

if sys.argv[1:2] == ["check"]:
    sys.exit(check(sys.argv[2:]))
main()

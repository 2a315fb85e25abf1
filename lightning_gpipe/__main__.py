"""``python -m lightning_gpipe fit --config config.yaml``; or ``check``, or ``plan``."""

from lightning_gpipe.commands import run

run()

"""``python -m lightning_gpipe fit --config config.yaml``."""

from lightning_gpipe.cli import main

main()

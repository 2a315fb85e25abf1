"""Flattens a model whose layers are in groups into one nn.Sequential, with the same names."""

from lightning_gpipe.core.frontends import flatten

__all__ = ["flatten"]

"""One flat nn.Sequential of a model that has its layers in groups, under the same names."""

from lightning_gpipe.core.frontends import flatten

__all__ = ["flatten"]

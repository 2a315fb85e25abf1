"""Weights from a folder, each tensor read onto the device of its stage."""

from lightning_gpipe.core.frontends import load_pretrained, parameters_on_meta

__all__ = ["load_pretrained", "parameters_on_meta"]

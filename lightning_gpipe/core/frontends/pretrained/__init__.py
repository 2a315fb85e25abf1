"""Weights from a folder of safetensors, each tensor read onto the device of its stage."""

from lightning_gpipe.core.frontends.pretrained.loading import load_pretrained
from lightning_gpipe.core.frontends.pretrained.parameters_on_meta import parameters_on_meta

__all__ = ["load_pretrained", "parameters_on_meta"]

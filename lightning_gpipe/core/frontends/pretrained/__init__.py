"""Weights from a folder of safetensors, each tensor read onto the device of its stage."""

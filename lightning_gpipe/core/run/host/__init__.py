"""Weights and waiting activations that are on a device only around their use."""

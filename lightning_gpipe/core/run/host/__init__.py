"""The memory of the host, for what no stage needs at the time: weights, and activations."""

"""What is in the memory of the host while no stage needs it: weights, and activations."""

"""What is on a device only around its use: weights, and activations that wait on the host."""

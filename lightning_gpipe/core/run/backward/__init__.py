"""Backward through a stage: its roots and leaves, its graph, and the sums of gradients."""

"""Layers whose results depend on the rows of a batch: batch norms, and those that mix rows."""

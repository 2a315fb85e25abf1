"""Splits mini-batches into micro-batches, and merges their outputs."""

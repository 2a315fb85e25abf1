"""The state of the caller's thread, entered again in workers and on recomputation."""

"""Random numbers that are the same on recomputation and under any timing of threads."""

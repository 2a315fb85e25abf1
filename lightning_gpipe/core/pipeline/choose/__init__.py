"""Chooses the balance and the plan of a pipeline, and measures what they need."""

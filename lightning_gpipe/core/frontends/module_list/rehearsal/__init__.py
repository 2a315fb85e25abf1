"""Runs calls on a few rows, to learn what they return and which arguments have rows."""

"""The tape of one forward: its calls, their arguments and results, and placeholders for these."""

"""Notices what layers and users do that a pipeline cannot compute as the plain module does."""

"""Connecting: processes find one another, and wait for a limited time."""

"""The state that layers change in forward: saved, restored, and told apart."""

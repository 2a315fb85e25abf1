"""The rows of a batch in the values of a traced forward: their dim, and checks of their use."""

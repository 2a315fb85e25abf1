"""The choice of the balance and the plan of a pipeline, and its measurements."""

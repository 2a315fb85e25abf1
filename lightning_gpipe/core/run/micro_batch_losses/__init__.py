"""Mini-batches with a loss for each micro-batch: the user's step runs between the stages."""

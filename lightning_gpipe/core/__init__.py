"""The pipeline itself: PyTorch only, no Lightning."""

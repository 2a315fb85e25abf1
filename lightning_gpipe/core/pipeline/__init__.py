"""The facade: from the user's model, a balance and devices to a model that runs as a pipeline.

:class:`GPipe` is what a user makes. It finds what to pipe in the model, by its type, places
everything, and calls the model as it is; :class:`Pipeline` is what runs micro-batches then.
"""

from lightning_gpipe.core.pipeline.gpipe import GPipe
from lightning_gpipe.core.pipeline.pipeline import Pipeline

__all__ = [
    "GPipe",
    "Pipeline",
]

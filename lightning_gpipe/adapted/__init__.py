"""What in Lightning assumes that a process has one device, adapted while there is a pipeline.

Each module adapts one thing: callbacks that average, finetune or monitor, the profiler, the logs of
the LightningModule. After teardown all of it is as the user made it.
"""

from lightning_gpipe.adapted.profiling import path_of
from lightning_gpipe.adapted.trainer import AdaptedTrainer

__all__ = ["AdaptedTrainer", "path_of"]

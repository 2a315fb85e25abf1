"""Parts of Lightning that assume one device per process, adapted while there is a pipeline.

Each module adapts one thing: callbacks that average, finetune or monitor, the profiler, the logs of
the LightningModule. After teardown all of it is as the user made it.
"""

from lightning_gpipe.strategy.adapters.averages import WeightAveraging
from lightning_gpipe.strategy.adapters.profiling import path_of
from lightning_gpipe.strategy.adapters.trainer import AdaptedTrainer

__all__ = ["AdaptedTrainer", "WeightAveraging", "path_of"]

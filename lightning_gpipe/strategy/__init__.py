"""GPipeStrategy: a LightningModule in a Trainer, of which a module runs as a pipeline.

``gpipe`` has Lightning's hooks; each calls a part of the strategy.
"""

from lightning_gpipe.strategy.adapters.profiling import path_of
from lightning_gpipe.strategy.gpipe import GPipeStrategy
from lightning_gpipe.strategy.sample import entries_in, optimizers_of

__all__ = ["GPipeStrategy", "entries_in", "optimizers_of", "path_of"]

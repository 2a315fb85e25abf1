"""The facade: from the user's model, a balance and devices to a model that runs as a pipeline.

:class:`GPipe` is called like the model; :class:`Pipeline` runs the micro-batches.
"""

from lightning_gpipe.core.pipeline.choose.balance_functions import (
    balance_by_memory,
    balance_by_parameters,
    balance_by_time,
)
from lightning_gpipe.core.pipeline.choose.balancing import (
    CRITERIA,
    balance_of_each,
    is_criterion,
    parameters_around,
)
from lightning_gpipe.core.pipeline.choose.measuring import LayerMeasurement, profile
from lightning_gpipe.core.pipeline.choose.options import Requested, Resolved
from lightning_gpipe.core.pipeline.choose.planning import memory_of, plan, plan_measured, resolve
from lightning_gpipe.core.pipeline.choose.sampling import Entry, calling, entries_of, unchanged
from lightning_gpipe.core.pipeline.gpipe import GPipe
from lightning_gpipe.core.pipeline.micro_batch_steps import (
    MicroBatchStepping,
    Outcome,
    StepSchedule,
)
from lightning_gpipe.core.pipeline.piped_module import PipedModule, piped_modules_at
from lightning_gpipe.core.pipeline.pipeline import Pipeline

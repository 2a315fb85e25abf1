"""Measures what layers cost, and runs them one by one on a whole batch.

The costs are a :class:`~lightning_gpipe.core.balance.ModelProfile`, measured one layer at a time.
"""

from lightning_gpipe.core.profile.layers import Subject, profile_layers
from lightning_gpipe.core.profile.meters import host_speed
from lightning_gpipe.core.profile.optimizers import Optimizers, joins_parameters
from lightning_gpipe.core.profile.walk import Visit, following, walk_program

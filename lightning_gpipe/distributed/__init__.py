"""A Trainer in several processes, which run a pipeline together, or replicas of it.

Each process of a pipeline runs the same code on the same values, and has the parameters of its own
stages only. Here they agree on batches, random numbers, norms, decisions, checkpoints, and the
gradients of shared parameters. Replicas have batches of their own, and average their gradients.
"""

from lightning_gpipe.distributed.arrangement import Arrangement, Mode
from lightning_gpipe.distributed.buckets import divisible
from lightning_gpipe.distributed.children import ProcessLauncher, Scripts
from lightning_gpipe.distributed.comparison import check_same, shapes, versions
from lightning_gpipe.distributed.data_parallel import WorldSizeCalls, refuse_world_size
from lightning_gpipe.distributed.ddp import (
    bucket_bytes,
    check_options,
    check_static_graph,
    equalise,
    equalise_buffers,
    gathered,
    gathered_with_gradients,
    leaves_early,
    replicated,
)
from lightning_gpipe.distributed.fully_sharded import undoing_fully_shard
from lightning_gpipe.distributed.gathering import (
    own_optimizer_keys,
    own_state,
    whole_optimizer_state,
    whole_state,
    without_shards,
)
from lightning_gpipe.distributed.gradient_averages import GradientAverages
from lightning_gpipe.distributed.gradients import SameParameters, check_alike, gradient_norms
from lightning_gpipe.distributed.gradients_around import GradientsAround
from lightning_gpipe.distributed.group import Group
from lightning_gpipe.distributed.optimizer_shards import OptimizerShards
from lightning_gpipe.distributed.process_groups import ProcessGroups, connect
from lightning_gpipe.distributed.rendezvous import start_together
from lightning_gpipe.distributed.replica_weights import ReplicaWeights, drop_values, gather_values
from lightning_gpipe.distributed.shared_batches import (
    SharedLoader,
    has_batch_hooks,
    is_without_values,
    unshare,
)
from lightning_gpipe.distributed.shares import Shares

"""Runs mini-batches: stages with their layers, and workers with their rows of a schedule.

A mini-batch enters at stage 0 in micro-batches and leaves as one node in the caller's graph; the
workers in between interpret the schedule and decide nothing.
"""

from lightning_gpipe.core.run.autograd_node import leaves_around
from lightning_gpipe.core.run.backward.roots import leaves_behind
from lightning_gpipe.core.run.divided_weights import DividedWeights
from lightning_gpipe.core.run.engine import Engine
from lightning_gpipe.core.run.gradient_home import GradientHome, GradientTransfer, own_parameters
from lightning_gpipe.core.run.guards.lost_gradients import refuse_second_backward
from lightning_gpipe.core.run.guards.output_uses import watch_outputs
from lightning_gpipe.core.run.guards.values_on_layers import ValuesOnLayers
from lightning_gpipe.core.run.micro_batch_losses.coroutine import greenlets
from lightning_gpipe.core.run.micro_batch_losses.losses import LOSS_WEIGHT, Losses, loss_and_weight
from lightning_gpipe.core.run.micro_batch_losses.user_step import UserStep
from lightning_gpipe.core.run.minibatch_run import pass_alone
from lightning_gpipe.core.run.observe.clocks import seconds_behind
from lightning_gpipe.core.run.observe.threads_or_inline import (
    RunTimes,
    Threads,
    ThreadsOrInline,
    check_threads,
)
from lightning_gpipe.core.run.observe.timeline import Observation, Timeline, spans_of_all, typical
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass, in_layers
from lightning_gpipe.core.run.step_at_last import StepAtLast

"""A Trainer in several processes, which run a pipeline together, or replicas of it.

Each process of a pipeline runs the same code on the same values, and has the parameters of its own
stages only. What they must agree on (batches, random numbers, gradients of what each of them has,
norms, decisions, checkpoints) is here; what crosses from stage to stage is the engine's. Replicas
have batches of their own, and average their gradients.
"""

from lightning_gpipe.processes.arrangement import Mode
from lightning_gpipe.processes.group import Group
from lightning_gpipe.processes.in_step import InStep
from lightning_gpipe.processes.launching import StartMethod, Terms, check_processes
from lightning_gpipe.processes.strategy import OverProcesses

__all__ = [
    "Group",
    "InStep",
    "Mode",
    "OverProcesses",
    "StartMethod",
    "Terms",
    "check_processes",
]

"""A Trainer in several processes that run one pipeline together.

Each of them runs the same code on the same values, and has the parameters of its own stages only.
What they must agree on (batches, random numbers, gradients of what each of them has, norms,
decisions, checkpoints) is here; what crosses from stage to stage is the engine's.
"""

from lightning_gpipe.processes.launching import Mode, StartMethod, check_processes
from lightning_gpipe.processes.strategy import OverProcesses

__all__ = ["Mode", "OverProcesses", "StartMethod", "check_processes"]

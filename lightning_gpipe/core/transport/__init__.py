"""What carries tensors between workers, and runs the workers that it owns.

A worker names the action that needs its result; the transport knows whether that action runs on the
same thread, on another one or in another process.
"""

from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import (
    BETWEEN,
    NO_RUN,
    Cancelled,
    Exchange,
    Label,
    OutOfStep,
    RankFailed,
    Task,
    Transport,
)
from lightning_gpipe.core.transport.local import LocalTransport, Workers
from lightning_gpipe.core.transport.process_group import (
    Connection,
    Lifeline,
    ProcessGroupTransport,
    addresses_of_interfaces,
    end_waits,
    join_processes,
    meet,
    own_addresses,
    patience_of,
    within,
)
from lightning_gpipe.core.transport.twins import Twins

__all__ = [
    "BETWEEN",
    "NO_RUN",
    "Cancelled",
    "Connection",
    "Exchange",
    "InlineTransport",
    "Label",
    "Lifeline",
    "LocalTransport",
    "OutOfStep",
    "ProcessGroupTransport",
    "RankFailed",
    "Task",
    "Transport",
    "Twins",
    "Workers",
    "addresses_of_interfaces",
    "end_waits",
    "join_processes",
    "meet",
    "own_addresses",
    "patience_of",
    "within",
]

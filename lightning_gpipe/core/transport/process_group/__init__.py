"""Workers in several processes, connected by torch.distributed.

Worker, schedule and stage stay as they are: what comes from another process is put into the same
inboxes, by a thread for each other process.
"""

from lightning_gpipe.core.transport.process_group.address import (
    addresses_of_interfaces,
    own_addresses,
)
from lightning_gpipe.core.transport.process_group.bounded import within
from lightning_gpipe.core.transport.process_group.cutting import end_waits
from lightning_gpipe.core.transport.process_group.groups import join_processes, patience_of
from lightning_gpipe.core.transport.process_group.lifeline import Lifeline
from lightning_gpipe.core.transport.process_group.meeting import meet
from lightning_gpipe.core.transport.process_group.sharing import Connection
from lightning_gpipe.core.transport.process_group.transport import ProcessGroupTransport

__all__ = [
    "Connection",
    "Lifeline",
    "ProcessGroupTransport",
    "addresses_of_interfaces",
    "end_waits",
    "join_processes",
    "meet",
    "own_addresses",
    "patience_of",
    "within",
]

"""Workers in several processes, connected by torch.distributed.

Worker, schedule and stage stay as they are: what comes from another process is put into the same
inboxes, by a thread for each other process.
"""

from lightning_gpipe.core.transport.process_group.cutting import end_waits
from lightning_gpipe.core.transport.process_group.groups import join_processes
from lightning_gpipe.core.transport.process_group.lifeline import Lifeline
from lightning_gpipe.core.transport.process_group.sharing import Connection
from lightning_gpipe.core.transport.process_group.transport import ProcessGroupTransport

__all__ = ["Connection", "Lifeline", "ProcessGroupTransport", "end_waits", "join_processes"]

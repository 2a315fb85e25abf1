"""Workers in several processes, connected by torch.distributed.

Worker, schedule and stage stay as they are: what comes from another process is put into the same
inboxes, by a thread for each other process.
"""

from lightning_gpipe.core.transport.process_group.groups import Connection, join_processes
from lightning_gpipe.core.transport.process_group.ledger import OutOfStep, RankFailed
from lightning_gpipe.core.transport.process_group.transport import ProcessGroupTransport

__all__ = ["Connection", "OutOfStep", "ProcessGroupTransport", "RankFailed", "join_processes"]

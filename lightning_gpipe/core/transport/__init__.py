"""What carries tensors between workers, and runs the workers that it owns.

A worker names the action that needs what it made; whether that is in the same thread, in another
one or in another process is the transport's business.
"""

from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import Cancelled, Exchange, Task, Transport
from lightning_gpipe.core.transport.local import LocalTransport

__all__ = [
    "Cancelled",
    "Exchange",
    "InlineTransport",
    "LocalTransport",
    "Task",
    "Transport",
]

"""Transports: they carry tensors between workers, and run the workers of this process.

A worker names the action that needs its result; the transport knows whether that action runs on the
same thread, on another one or in another process.
"""

from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import (
    BETWEEN,
    NO_RUN,
    STEP,
    TOLD,
    Exchange,
    Label,
    OutOfStep,
    OutputElsewhere,
    RankFailed,
    RunCancelled,
    Task,
    Transport,
)
from lightning_gpipe.core.transport.local import LocalTransport, Workers
from lightning_gpipe.core.transport.process_group.abort import (
    abort_group,
    is_broken_connection,
    set_connected,
)
from lightning_gpipe.core.transport.process_group.connecting.address import (
    choose_interface,
    connecting_on_demand,
)
from lightning_gpipe.core.transport.process_group.connecting.groups import (
    Lifeline,
    join_processes,
    rank_among,
    start_timeout,
)
from lightning_gpipe.core.transport.process_group.connecting.listening import (
    listen,
    resolve,
    wait_for_server,
)
from lightning_gpipe.core.transport.process_group.connecting.rendezvous import (
    call_with_timeout,
    store_barrier,
)
from lightning_gpipe.core.transport.process_group.connecting.shared_connections import Connection
from lightning_gpipe.core.transport.process_group.connecting.signed_store import (
    make_token,
    signature,
)
from lightning_gpipe.core.transport.process_group.mismatch import BY_EARLIER_STEPS
from lightning_gpipe.core.transport.process_group.transport import ProcessGroupTransport
from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.whereabouts import (
    OBSERVED,
    OWN,
    SAME_CODE,
    ranges_of,
    users_line,
)
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    bytes_in,
    receive_value,
    send_value,
)
from lightning_gpipe.core.transport.threads import FRAMES, check_cores

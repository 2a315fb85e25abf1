"""The front-end for any module: its forward is traced by torch.fx and cut between its layers.

The layers stay the user's own modules. A forward that cannot be traced is refused, with the line.
"""

from lightning_gpipe.core.frontends.traced.call_graph import UnsupportedForward
from lightning_gpipe.core.frontends.traced.traced_module import TracedForward

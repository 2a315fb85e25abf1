"""From the user's module to the modules of stages: located, placed on devices, and installed.

The user's objects and their names stay the same; a module that cannot be pipelined is refused here,
before anything has run.
"""

from lightning_gpipe.core.frontends.device_moves import (
    become,
    choose_devices,
    forget_values,
    move_home,
    on_meta,
    place_all,
    recall,
    replaceable,
    with_index,
)
from lightning_gpipe.core.frontends.dispatched import remove_dispatch_hooks
from lightning_gpipe.core.frontends.frontend import RunProgram
from lightning_gpipe.core.frontends.install import check_recordable, is_installed
from lightning_gpipe.core.frontends.locate import candidates, frontend_of, heaviest, module_at
from lightning_gpipe.core.frontends.pretrained import load_pretrained, parameters_on_meta
from lightning_gpipe.core.frontends.stand_in import StandIn
from lightning_gpipe.core.frontends.stored import await_value, is_in_another_process, place_of_value
from lightning_gpipe.core.frontends.traced import UnsupportedForward

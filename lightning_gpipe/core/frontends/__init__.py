"""From the user's module to what the stages run: located, flattened, placed on devices, installed.

The user's objects and their names stay the same; a module that cannot be pipelined is refused here,
before anything has run.
"""

from lightning_gpipe.core.frontends.devices import choose_devices, with_index
from lightning_gpipe.core.frontends.dispatched import undispatch
from lightning_gpipe.core.frontends.flatten import flatten
from lightning_gpipe.core.frontends.install import (
    Installed,
    check_free,
    check_recordable,
    install,
    is_installed,
)
from lightning_gpipe.core.frontends.interface import Frontend, Processes, RunProgram
from lightning_gpipe.core.frontends.kinds import frontend_of
from lightning_gpipe.core.frontends.locate import candidates, heaviest, locate
from lightning_gpipe.core.frontends.module_list import Loop
from lightning_gpipe.core.frontends.placement import (
    forget,
    forget_values,
    move,
    on_meta,
    place,
    place_around,
    place_own,
    replaceable,
)
from lightning_gpipe.core.frontends.pretrained import load_pretrained, parameters_on_meta
from lightning_gpipe.core.frontends.stand_in import StandIn
from lightning_gpipe.core.frontends.stored import check_awaited, is_elsewhere
from lightning_gpipe.core.frontends.traced import Traced

__all__ = [
    "Frontend",
    "Installed",
    "Loop",
    "Processes",
    "RunProgram",
    "StandIn",
    "Traced",
    "candidates",
    "check_awaited",
    "check_free",
    "check_recordable",
    "choose_devices",
    "flatten",
    "forget",
    "forget_values",
    "frontend_of",
    "heaviest",
    "install",
    "is_elsewhere",
    "is_installed",
    "load_pretrained",
    "locate",
    "move",
    "on_meta",
    "parameters_on_meta",
    "place",
    "place_around",
    "place_own",
    "replaceable",
    "undispatch",
    "with_index",
]

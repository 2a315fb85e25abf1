"""From the user's module to what the stages run: which module, cut where, placed on which device.

The user's objects stay what they are, under the names that they have; what cannot be pipelined is
refused here, before anything has run.
"""

from lightning_gpipe.core.frontends.devices import choose_devices, with_index
from lightning_gpipe.core.frontends.flatten import flatten
from lightning_gpipe.core.frontends.install import install, remove
from lightning_gpipe.core.frontends.locate import locate
from lightning_gpipe.core.frontends.placement import move, on_meta, place, place_around

__all__ = [
    "choose_devices",
    "flatten",
    "install",
    "locate",
    "move",
    "on_meta",
    "place",
    "place_around",
    "remove",
    "with_index",
]

"""Builds a model without the memory of its parameters, and with the values of its buffers.

Under ``torch.device("meta")`` buffers have no values either, and those that no file has, such as
the frequencies of rotary embeddings, are computed in the constructor alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that this thread builds in a ``with`` block on the meta device.

    A parameter moves there as soon as a module has it, so the host has one of them at a time.
    Buffers have the values that the module's constructor gives them. Parameters of other classes
    than ``nn.Parameter`` stay as they are.
    """
    thread = get_ident()
    # A tied parameter is registered several times; to hold it would hold its memory.
    replacements: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    # PyTorch declares that such a hook returns nothing, and takes a parameter from it.
    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta or get_ident() != thread:
            return None  # registered as it is
        if parameter not in replacements:
            replacements[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        return replacements[parameter]

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()

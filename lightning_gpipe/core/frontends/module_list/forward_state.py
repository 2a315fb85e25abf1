"""The state that must not change until blocks run, of the thread and of what each call sees.

All blocks run when the last one is called, under one grad mode and one autocast. What a forward
sets around a call and resets would have the later value by then: a mode, an attribute or a hook of
the block, a context variable, a tensor edited in place. So changes are found and refused.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.faithful import saved_tensors_hooks, version_of
from lightning_gpipe.core.frontends.module_list.tape.arguments import Arguments
from lightning_gpipe.core.frontends.module_list.tape.calls import RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.layout import contents, is_user_object


class ForwardState(NamedTuple):
    """The thread-local settings that decide how blocks compute.

    ``autocast`` has its types, False without it, for the CPU and another device; ``hooks`` are the
    innermost on saved tensors, but for those of ``torch.utils.checkpoint``: stages recompute.
    """

    grad: bool
    inference: bool
    autocast: Any
    hooks: Any

    @classmethod
    def now(cls, device: torch.device) -> ForwardState:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(grad, inference, _autocast(device), saved_tensors_hooks())

    def check(self, device: torch.device, line: str) -> None:
        now = ForwardState.now(device)
        if self == now:
            return
        names = ("grad mode", "inference mode", "autocast", "the hooks on saved tensors")
        changed = ", ".join(
            f"{name} from {before} to {after}"
            for name, before, after in zip(names, self, now, strict=True)
            if before != after
        )
        raise RuntimeError(
            "all blocks of a pipeline run in the same state of the thread: at "
            f"{line} it changes {changed}. Set it around the whole loop, or within a block. A "
            "torch.utils.checkpoint around blocks is not needed, since the pipeline has "
            "activation_checkpointing: leave it out, or write use_reentrant=False."
        )


def _autocast(device: torch.device) -> Any:
    cpu = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    kind = device.type
    if kind in ("cpu", "meta"):
        return cpu
    return cpu, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


_PLAIN = frozenset({bool, int, float, str, type(None)})


class CallState:
    """The values that a recorded call sees: attributes, hooks, context variables, arguments.

    ``arguments`` is None for a call that an earlier forward made too, when all was compared.
    """

    def __init__(self, call: RecordedCall, arguments: Arguments | None) -> None:
        self._call = call
        leaves = None if arguments is None else arguments.leaves
        self._arguments = leaves and [x for x in leaves if type(x[1]) is not Placeholder]
        self.renew()

    def renew(self) -> None:
        """Begin anew, as after a rehearsal, which may edit what it restores."""
        self._before = self._now()

    def check(self) -> None:
        before, now, call = self._before, self._now(), self._call
        if names := [k for k in before | now if not _same(before.get(k), now.get(k))]:
            raise RuntimeError(
                f"{call.name} must see what it saw when it was called until the last block has "
                f"returned, since all blocks run then: {', '.join(names)} changed after its call "
                f"at {call.line}. Give it the value as an argument that stays as it is, set it "
                "around the whole loop, or do this in the block."
            )

    def _now(self) -> dict[str, list[Any]]:
        modules = self._call.modules
        if self._arguments is None:
            return {k: [x] for each in modules for k, x in vars(each).items() if type(x) in _PLAIN}
        attributes = {
            # The dict of parameters may be another once the worker of a later stage has begun.
            f"{path}.{name}".lstrip("."): _pieces(value)[name == "_parameters" :]
            for each in modules
            for path, module in each.named_modules()
            for name, value in vars(module).items()
        }
        titled = {self._call.titles([path]): _pieces(x) for path, x in self._arguments}
        variables = {repr(x.name): [value] for x, value in copy_context().items()}
        return attributes | {f"argument {k}": x for k, x in titled.items()} | variables


def _pieces(value: Any) -> list[Any]:
    """Return the objects in a value, and versions: others if it is edited; no placeholders."""
    held = vars(value) if is_user_object(value) else value
    pieces = [value, *(held if isinstance(held, dict) else ()), *contents(held)]
    pieces = [x.number if type(x) is Placeholder else x for x in pieces]
    tensors = [x for x in pieces if isinstance(x, Tensor)]
    return [*pieces, *map(version_of, tensors), *(x.requires_grad for x in tensors)]


def _same(before: list[Any] | None, now: list[Any] | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return False
    return all(
        x is y or (type(x) is type(y) and type(x) in _PLAIN and x == y)
        for x, y in zip(before, now, strict=True)
    )

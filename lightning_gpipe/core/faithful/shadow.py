"""Leaves that replace a module's parameters while micro-batches run.

A parameter's gradient must arrive once per backward, after all micro-batches, or hooks fire too
often, data parallelism breaks and ``torch.autograd.grad(loss, params)`` cannot work. So micro-batch
graphs must not end in the parameters, nor their gradients take memory for a second set.

A shadow is a leaf that aliases a parameter's storage and its version counter, with its class and
attributes. The graphs of all micro-batches end in the shadows, autograd adds the gradients up in
place, and ``shadow.grad`` is passed to the parameter at the end without a copy.

A parameter that stages on several devices share has one home. On the other devices its shadow is a
copy, made anew for every mini-batch, whose gradients are added to that at home. Where the home is
the host, or another replica, the copies get their values while the mini-batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import apart, checksum
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.parameter_leaves import (
    WeightPart,
    copy_like,
    has_memory,
    hollow_copy,
    leaf_like,
)
from lightning_gpipe.core.faithful.parameter_slots import ParameterSlots
from lightning_gpipe.core.faithful.state.behavior import version_of
from lightning_gpipe.core.layout import Slot, tensors_within

_Swap = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]  # a slot and its new value
_HOOKS, _HOOKS_AFTER = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
_GRADIENT = attrgetter("grad")
_CopyState = tuple[list[int], list[Any]]  # versions and objects


class Shadows:
    """The shadows of one mini-batch on one stage.

    Args:
        grad: Whether gradients are recorded; if not, only followed parameters have shadows.
        followed: The slots of parameters with another home.
        values: The values of followed parameters that have none in this process, by their ids.
        on_host: Whether followed parameters at home on the host get their values later.
        divided: Whether those without values in this process, which have none in ``values``, do.
        examined: Whether to look for edits of copies by their values, which takes time.
        recomputed: Whether forward will run again, so that edits in between must be detected.
        by_caller: Returns whether the caller's code calls, which must not find shadows.

    Attributes:
        hosted: The tensors whose values come later, each with that of its hollow shadow.
        without_gradient: The shadows that may get one, and had none yet.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        grad: bool,
        device: torch.device,
        followed: Collection[Slot] = (),
        values: Mapping[int, Tensor] | None = None,
        on_host: bool = False,
        divided: bool = False,
        examined: bool = False,
        recomputed: bool = True,
        by_caller: Callable[[], bool] | None = None,
    ) -> None:
        # By id, as everywhere here: to hash a tensor is a slow call into Python.
        self._of: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # Parameters whose shadow is a copy, with the state of that.
        self._copied: dict[int, tuple[nn.Parameter, nn.Parameter, _CopyState]] = {}
        self._swaps: list[Write] = []
        self._frozen: list[_Swap] = []
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._watched: list[nn.Parameter] = []  # whose edits are detected
        self._values = values or {}
        self._on_host = on_host
        self._divided = divided
        self.examined = examined
        self._checksums: dict[int, Tensor] = {}  # of copies, by id as above
        self.hosted: list[WeightPart] = []
        self.in_place = False
        pairs, swaps = self._of, self._swaps
        for module in modules:
            slots = module._parameters
            for name, parameter in slots.items():
                if parameter is None:
                    continue
                follows = followed and (module, name) in followed
                if follows or (grad and parameter.requires_grad):
                    key = id(parameter)
                    if key not in pairs:  # it may be in several slots
                        new = (
                            self._copy(parameter, device) if follows else leaf_like(parameter, True)
                        )
                        pairs[key] = parameter, new
                    swaps.append((slots, name, pairs[key][1]))
                elif grad:
                    self._frozen.append((slots, name, parameter))
        if by_caller is not None:
            self._hide(modules, by_caller)
        self.parameters = [p for p, _ in self._of.values() if p.requires_grad]
        self.without_gradient = [new for p, new in self._of.values() if p.requires_grad]
        if grad and recomputed:
            frozen = {id(p): p for _, _, p in self._frozen}
            self._watched = [*(p for p, _ in self._of.values()), *frozen.values()]
        self.record_versions()

    def _copy(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        key, requires_grad = id(parameter), parameter.requires_grad
        if (self._on_host and parameter.device.type == "cpu") or (
            self._divided and parameter.is_meta and key not in self._values
        ):
            shadow, parts = hollow_copy(parameter, requires_grad, device)
            self.hosted += parts
        else:
            shadow = copy_like(parameter, requires_grad, device, self._values.get(key))
            if self.examined and has_memory(shadow):
                self._checksums[key] = checksum(shadow)
        self._copied[key] = parameter, shadow, _state_of(shadow, parameter)
        return shadow

    def _hide(self, modules: Iterable[nn.Module], by_caller: Callable[[], bool]) -> None:
        hidden = {
            id(slots): ParameterSlots(slots, by_caller)
            for slots in (vars(module).get("_parameters") for module in modules)
            if slots  # a scripted module has none
        }
        swaps, self._swaps = self._swaps, []
        for slots, name, shadow in swaps:
            if id(slots) in hidden:
                hidden[id(slots)].hide(name, shadow)
            else:
                self._swaps.append((slots, name, shadow))
        self._frozen = [(hidden.get(id(slots), slots), name, p) for slots, name, p in self._frozen]
        self._swaps += [
            (vars(module), "_parameters", hidden[id(module._parameters)])
            for module in modules
            if id(module._parameters) in hidden
        ]

    def swapped_in(self, journal: Journal) -> Manager:
        frozen = self._frozen and self._as_in_forward()
        return journal.changed([(vars(self), "in_place", True), *self._swaps, *frozen])

    def shadow_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._of[id(parameter)][1]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(self._of.values())

    def record_versions(self) -> None:
        """Record the version counters after forward: only later edits count."""
        if self._watched:
            self._versions = [(p, p._version) for p in self._watched if not p.is_inference()]

    @property
    def edited(self) -> list[nn.Parameter]:
        return [parameter for parameter, version in self._versions if parameter._version != version]

    @property
    def hooked(self) -> nn.Parameter | None:
        if not has_hooks(*[shadow for _, shadow in self._of.values()]):
            return None  # most often
        return next(parameter for parameter, shadow in self._of.values() if has_hooks(shadow))

    @property
    def replaced(self) -> nn.Parameter | None:
        """A parameter whose shadow was given other data, if there is one."""
        for key, (parameter, shadow) in self._of.items():
            if key in self._copied or not has_memory(parameter):
                continue
            if parameter.data_ptr() != shadow.data_ptr():
                return parameter
        return None

    @property
    def lost(self) -> nn.Parameter | None:
        """A followed parameter whose copy was edited, itself or an attribute, if there is one."""
        for key, (parameter, shadow, (versions, objects)) in self._copied.items():
            before = self._checksums.get(key)  # an edit by its data has another version counter
            same = before is None or torch.equal(before, checksum(shadow))
            present, held = _state_of(shadow, parameter)
            others = len(objects) != len(held) or any(map(is_not, objects, held))
            if versions != present or others or not same:
                return parameter
        return None

    def _as_in_forward(self) -> Iterator[_Swap]:
        """Yield aliases of parameters that were frozen in forward but are no longer there."""
        for slots, name, parameter in self._frozen:
            if name in slots and (parameter.requires_grad or slots[name] is not parameter):
                yield slots, name, leaf_like(parameter, requires_grad=False)

    def own_gradients(self, others: Iterable[Any]) -> None:
        """Copy the first gradients that share memory, with one another or with others.

        Autograd takes over the first gradient of a leaf, which may be a view of that of another
        leaf or of what entered the backward, and adds the next to it in place.
        """
        new: list[nn.Parameter] = []
        without: list[nn.Parameter] = []
        for shadow in self.without_gradient:
            (without if shadow.grad is None else new).append(shadow)
        for shadow, gradient in zip(new, apart(map(_GRADIENT, new), others), strict=True):
            shadow.grad = gradient
        self.without_gradient = without

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the sums of the parameters' gradients; the shadows no longer hold them."""
        sums = []
        for parameter, shadow in self._of.values():
            gradient = shadow.grad
            if gradient is not None:
                shadow.grad = None
                sums.append((parameter, gradient))
        return sums


def has_hooks(*parameters: Tensor) -> bool:
    """Return whether hooks on the gradient of one of these parameters are registered."""
    return any(map(_HOOKS, parameters)) or any(map(_HOOKS_AFTER, parameters))


def _state_of(copy: nn.Parameter, parameter: nn.Parameter) -> _CopyState:
    """Return the version counters of a copy's tensors, and these with its own attributes."""
    own = {} if vars(copy) is vars(parameter) else vars(copy)
    tensors = [copy, *tensors_within(own)]
    return list(map(version_of, tensors)), [*tensors, *own.values()]

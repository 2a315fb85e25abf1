"""Leaves that replace a module's parameters while micro-batches run.

A parameter's gradient must arrive once per backward, after all micro-batches, or hooks fire too
often, data parallelism breaks and ``torch.autograd.grad(loss, params)`` cannot work. So micro-batch
graphs must not end in the parameters. To compute each micro-batch's gradients with
``torch.autograd.grad`` and add them up afterwards would need memory for a second set of gradients.

A shadow is a leaf that aliases a parameter's storage and its version counter. The graphs of all
micro-batches end in the shadows, autograd adds the gradients up in place, and ``shadow.grad`` is
passed to the parameter at the end without a copy. A shadow has the class of its parameter and
shares its attributes.

A parameter that stages on several devices share, such as an embedding that is also the weight of
the head, is on one of them, its home. On the others its shadow is a copy, made anew for every
mini-batch. The gradients of copies are added to that at home. Where the home is the memory of the
host, the copies get their values while the mini-batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.data import checksums
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.parameter_slots import ParameterSlots
from lightning_gpipe.core.faithful.state.behavior import version_of
from lightning_gpipe.core.layout import Slot

_Swap = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]  # a slot and its new value


class Shadows:
    """The shadows of one mini-batch on one stage.

    Args:
        modules: The modules whose parameters have shadows if they require a gradient.
        grad: Whether gradients are recorded; if not, only followed parameters have shadows.
        device: The device of the stage.
        followed: The slots of parameters with another home.
        values: The values of followed parameters that have none in this process, by their ids.
        on_host: Whether followed parameters at home on the host get their values later.
        examined: Whether to look for edits of copies by their values, which takes time.
        recomputed: Whether forward will run again, so that edits in between must be detected.
        by_caller: Returns whether the calling code is the caller's, which must not find shadows.
            None if it does not run while they are in the slots.

    Attributes:
        parameters: The parameters that have a shadow and require a gradient.
        in_place: Whether the shadows are in the parameters' slots now.
        hosted: The tensors that parameters on the host consist of, each with that of its shadow,
            which has a placeholder for its values.
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
        examined: bool = False,
        recomputed: bool = True,
        by_caller: Callable[[], bool] | None = None,
    ) -> None:
        # By id, as everywhere here: to hash a tensor is a slow call into Python.
        self._of: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # Parameters whose shadow is a copy, with its version counter.
        self._copied: dict[int, tuple[nn.Parameter, nn.Parameter, int]] = {}
        self._swaps: list[Write] = []
        self._frozen: list[_Swap] = []
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._watched: list[nn.Parameter] = []  # whose edits are detected
        self._values = values or {}
        self._on_host = on_host
        self.examined = examined
        self._checksums: dict[int, Tensor] = {}  # of copies, by id as above
        self.hosted: list[tuple[Tensor, Tensor]] = []
        self.in_place = False
        for module in modules:
            slots = module._parameters
            for name, parameter in slots.items():
                if parameter is None:
                    continue
                follows = bool(followed) and (module, name) in followed
                if follows or (grad and parameter.requires_grad):
                    pair = self._of.get(id(parameter))  # it may be in several slots
                    shadow = pair[1] if pair else self._new(parameter, follows, device)
                    self._swaps.append((slots, name, shadow))
                elif grad:
                    self._frozen.append((slots, name, parameter))
        if by_caller is not None:
            self._hide(modules, by_caller)
        self.parameters = [p for p, _ in self._of.values() if p.requires_grad]
        if grad and recomputed:
            frozen = {id(p): p for _, _, p in self._frozen}
            self._watched = [*(p for p, _ in self._of.values()), *frozen.values()]
        self.record_versions()

    def _new(self, parameter: nn.Parameter, follows: bool, device: torch.device) -> nn.Parameter:
        key = id(parameter)
        if not follows:
            shadow = leaf_like(parameter, requires_grad=True)
        else:
            requires_grad, value = parameter.requires_grad, self._values.get(key)
            hosted = self._on_host and parameter.device.type == "cpu"
            if hosted and has_memory(parameter):
                value = placeholder(parameter, device)
                shadow = leaf_like(parameter, requires_grad, value=value)
            else:
                shadow = leaf_like(parameter, requires_grad, copied_to=device, value=value)
            if hosted:
                self._host(parameter, shadow)
            elif self.examined and has_memory(shadow):
                self._checksums[key] = checksums(shadow)
            self._copied[key] = parameter, shadow, version_of(shadow)
        self._of[key] = parameter, shadow
        return shadow

    def _host(self, weight: Tensor, shadow: Tensor) -> None:
        """Have placeholders for the values of a shadow, and of the tensors that it is made of."""
        if is_traceable_wrapper_subclass(weight):
            for name in weight.__tensor_flatten__()[0]:
                self._host(getattr(weight, name), getattr(shadow, name))
        else:
            shadow.data = placeholder(weight, shadow.device)
            self.hosted.append((weight, shadow))

    def _hide(self, modules: Iterable[nn.Module], by_caller: Callable[[], bool]) -> None:
        """Let the caller's code find the parameters in the slots while the shadows are there."""
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
        """Put the shadows in the parameters' slots for the duration of a ``with`` block."""
        frozen = self._frozen and self._as_in_forward()
        return journal.changed([(vars(self), "in_place", True), *self._swaps, *frozen])

    def shadow_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the shadow of one of :attr:`parameters`."""
        return self._of[id(parameter)][1]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The parameters that have a shadow, each with its shadow."""
        return list(self._of.values())

    def record_versions(self) -> None:
        """Record the version counters after forward: only later edits count."""
        if self._watched:
            self._versions = [(p, p._version) for p in self._watched if not p.is_inference()]

    @property
    def edited(self) -> list[nn.Parameter]:
        """The parameters that were edited in place since their versions were recorded."""
        return [parameter for parameter, version in self._versions if parameter._version != version]

    @property
    def hooked(self) -> nn.Parameter | None:
        """A parameter on which a layer registered a hook in forward, if there is one."""
        for parameter, shadow in self._of.values():
            if has_hooks(shadow):
                return parameter
        return None

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
        """A followed parameter whose copy was edited in place, if there is one."""
        for key, (parameter, shadow, version) in self._copied.items():
            before = self._checksums.get(key)  # an edit by its data has another version counter
            same = before is None or torch.equal(before, checksums(shadow))
            if version_of(shadow) != version or not same:
                return parameter
        return None

    def _as_in_forward(self) -> Iterator[_Swap]:
        """Yield aliases of parameters that were frozen in forward but are no longer there."""
        for slots, name, parameter in self._frozen:
            if name in slots and (parameter.requires_grad or slots[name] is not parameter):
                yield slots, name, leaf_like(parameter, requires_grad=False)

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the sums of the parameters' gradients; the shadows no longer hold them."""
        sums = []
        for parameter, shadow in self._of.values():
            gradient = shadow.grad
            if gradient is not None:
                shadow.grad = None
                sums.append((parameter, gradient))
        return sums


def placeholder(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in the place of a parameter's values: of its shape, with one element.

    It is no number where it can be.
    """
    nothing = torch.nan if parameter.is_floating_point() else 0
    return torch.full((), nothing, dtype=parameter.dtype, device=device).expand(parameter.shape)


def leaf_like(
    parameter: Tensor,
    requires_grad: bool,
    copied_to: torch.device | None = None,
    value: Tensor | None = None,
) -> nn.Parameter:
    """Return a leaf of the parameter's class with its attributes: an alias, or a copy on a device.

    It may have another ``value``.
    """
    kind: Any = type(parameter)
    attributes = parameter.__dict__  # the very dict, so that what a layer adds to it stays
    if kind is nn.Parameter and copied_to is None and value is None:  # as most are
        alias: nn.Parameter = Tensor._make_subclass(kind, parameter, requires_grad)
        alias.__dict__ = attributes
        return alias
    value = parameter if value is None else value
    if copied_to is not None:
        with torch._C.DisableTorchFunctionSubclass():
            value = value.detach().to(copied_to, copy=True)
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        leaf = Tensor._make_subclass(kind, value, requires_grad)
    else:  # made of tensors that are attributes, so only its class can alias or copy it
        leaf = value.detach().requires_grad_(requires_grad)
        if copied_to is not None:
            attributes = {**attributes, **leaf.__dict__}
    leaf.__dict__ = attributes
    return cast(nn.Parameter, leaf)


def has_memory(parameter: nn.Parameter) -> bool:
    """Return whether its elements are in memory of its own, as those of any dense tensor."""
    if parameter.layout is not torch.strided:
        return False
    kind = type(parameter)
    return kind is nn.Parameter or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def has_hooks(parameter: Tensor) -> bool:
    """Return whether hooks on the parameter's gradient are registered."""
    after: dict[int, object] | None = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks or after)

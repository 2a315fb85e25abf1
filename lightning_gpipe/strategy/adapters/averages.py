"""Places the averages of the weights that Lightning's callbacks keep on several devices.

The callbacks move their copy of the whole model to ``pl_module.device``, where it may not fit. So
it stays on the CPU until the layers are on their devices; then each average goes to the device of
the tensor that it averages. With several processes, that is the meta device for the tensors of
other ones. There averaging has no effect, and a checkpoint has the averages of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from lightning_gpipe.core.frontends import forget_values, on_meta, replaceable

try:
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
except ImportError:  # new in Lightning 2.6
    WeightAveraging = StochasticWeightAveraging  # type: ignore[assignment,misc]

_KINDS = StochasticWeightAveraging, WeightAveraging


class Averages:
    """The averages of a model during a fit; without such a callback nothing happens.

    An average stays on the device that the user chose for it, if any. ``whole_state`` returns the
    state dict of a model with the values of all processes; ``in_parts`` whether there are several.
    """

    def __init__(
        self, whole_state: Callable[[nn.Module], dict[str, Any]], in_parts: Callable[[], bool]
    ) -> None:
        self._whole_state, self._in_parts = whole_state, in_parts
        self._callbacks: list[StochasticWeightAveraging | WeightAveraging] = []
        self._to_move: list[StochasticWeightAveraging | WeightAveraging] = []
        self._epoch = -1

    @staticmethod
    def left_by_a_fit(model: LightningModule) -> Iterator[nn.Module]:
        """Yield the averages of ``model`` that callbacks have, before it is placed again."""
        callbacks = model.trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        averaging = (x for x in callbacks if isinstance(x, _KINDS))
        copies = (callback._average_model for callback in averaging)
        yield from (_averaged(copy) for copy in copies if copy is not None)

    def hold_back(self, model: LightningModule) -> None:
        """Keep callbacks' copies of ``model``, which must not be on meta, on the CPU at first."""
        self.release()
        if model.trainer.state.fn != TrainerFn.FITTING:
            return
        callbacks = model.trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self._callbacks = [callback for callback in callbacks if isinstance(callback, _KINDS)]
        if self._callbacks and on_meta(model):
            raise ValueError(
                f"{type(self._callbacks[0]).__name__} copies the model before it is on its "
                "devices, so the layers must have memory by then: got a model on the meta device. "
                "Build it without Trainer.init_module(empty_init=True). If an earlier fit or "
                "validation has left layers to other processes, fit a new model."
            )
        self._to_move = [callback for callback in self._callbacks if callback._device is None]
        for callback in self._to_move:
            callback._device = torch.device("cpu")

    def follow(self, model: LightningModule) -> None:
        """Move each average beside its tensor, and batch norms' new statistics beside the layer."""
        if not self._callbacks:
            return
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                statistics = [module.running_mean, module.running_var]
                _move_beside((each, module.num_batches_tracked) for each in statistics)
        for callback in self._callbacks:
            copy = callback._average_model
            if copy is None:
                continue
            averaged = _averaged(copy)
            pairs = zip(_tensors(averaged), _tensors(model), strict=False)  # of a smaller model
            chosen = callback not in self._to_move
            with replaceable(*averaged.modules()):
                _move_beside((one, other) for one, other in pairs if other.is_meta or not chosen)
            if self._in_parts() and isinstance(copy, AveragedModel):
                vars(copy)["state_dict"] = partial(self._state_of, copy)

    def _state_of(self, copy: AveragedModel) -> dict[str, Any]:
        whole = {f"module.{name}": value for name, value in self._whole_state(copy.module).items()}
        return {"n_averaged": copy.n_averaged, **whole}

    def follow_in_epoch(self, model: LightningModule) -> None:
        if self._callbacks and model.current_epoch != self._epoch:
            self._epoch = model.current_epoch
            self.follow(model)

    def release(self) -> None:
        for callback in self._to_move:
            callback._device = None
        self._callbacks, self._to_move, self._epoch = [], [], -1


def _averaged(copy: nn.Module) -> nn.Module:
    return copy.module if isinstance(copy, AveragedModel) else copy


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _move_beside(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    for tensor, other in pairs:
        if tensor is None or other is None or tensor.device == other.device:
            continue
        if other.is_meta:
            forget_values(tensor)
        else:
            tensor.data = tensor.data.to(other.device)

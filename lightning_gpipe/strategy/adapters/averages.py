"""Places the averages of the weights that Lightning's callbacks keep on several devices.

The callbacks move their copy of the whole model to ``pl_module.device``, and put the statistics of
batch norms there before they compute them anew. The model of a pipeline may not fit on one device.
So the copy stays on the CPU, where it is made, until the layers are on their devices; then each
average goes to the device of the tensor that it averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from lightning_gpipe.core.frontends import on_meta

try:
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
except ImportError:  # new in Lightning 2.6
    WeightAveraging = StochasticWeightAveraging  # type: ignore[assignment,misc]


class Averages:
    """The averages of a model during a fit; without such a callback nothing happens.

    An average stays on the device that the user chose for it, if any.
    """

    def __init__(self) -> None:
        self._callbacks: list[StochasticWeightAveraging | WeightAveraging] = []
        self._to_move: list[StochasticWeightAveraging | WeightAveraging] = []
        self._epoch = -1

    def hold_back(self, model: LightningModule) -> None:
        """Make the callbacks keep their copies of ``model`` on the CPU at first.

        Raises:
            ValueError: If there is such a callback and ``model`` is on the meta device.
        """
        self.release()
        if model.trainer.state.fn != TrainerFn.FITTING:
            return
        callbacks = model.trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        kinds = StochasticWeightAveraging, WeightAveraging
        self._callbacks = [callback for callback in callbacks if isinstance(callback, kinds)]
        if self._callbacks and on_meta(model):
            raise ValueError(
                f"{type(self._callbacks[0]).__name__} copies the model before it is on its "
                "devices, so the layers must have memory by then: got a model on the meta device. "
                "Build it without Trainer.init_module(empty_init=True)."
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
                _move_beside(statistics, [module.num_batches_tracked] * 2)
        for callback in self._to_move:
            copy = callback._average_model
            if copy is not None:
                averaged = copy.module if isinstance(copy, AveragedModel) else copy
                _move_beside(_tensors(averaged), _tensors(model))

    def follow_in_epoch(self, model: LightningModule) -> None:
        if self._callbacks and model.current_epoch != self._epoch:
            self._epoch = model.current_epoch
            self.follow(model)

    def release(self) -> None:
        """Let the callbacks choose their devices again."""
        for callback in self._to_move:
            callback._device = None
        self._callbacks, self._to_move, self._epoch = [], [], -1


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers, in the order in which the callbacks pair them."""
    return chain(module.parameters(), module.buffers())


def _move_beside(tensors: Iterable[Tensor | None], others: Iterable[Tensor | None]) -> None:
    for tensor, other in zip(tensors, others, strict=False):  # a copy may be of a smaller model
        if tensor is not None and other is not None and tensor.device != other.device:
            tensor.data = tensor.data.to(other.device)

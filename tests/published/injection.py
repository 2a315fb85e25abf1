"""Pipelines in models that were not written for them: those of Lightning's own tests.

Most of Lightning's tests train a ``BoringModel``, a single nn.Linear. It must stay the model that
these tests look at, with ``layer.weight`` in its state dict, and yet be cut. So its linear layer is
a :class:`StagedLinear` from setup to teardown: two stages, and the same parameters under the same
names. A model without a linear layer gets a Sequential without parameters that no step calls: the
strategy does its work there, and it is counted that nothing ran as a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.frontends import candidates

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Choose = Callable[[_AcceleratorConnector], Strategy | str]

_BESIDE = "nothing_to_pipe"


class StagedLinear(nn.Linear):
    """An nn.Linear of two stages: the first one has its parameters."""

    enter: nn.Identity
    leave: nn.Identity

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.leave(nn.functional.linear(self.enter(input), self.weight, self.bias))


@dataclass
class Runs:
    """How often the strategy was set up, and what ran as a pipeline then."""

    setups: int = 0
    piped: int = 0
    batches: int = 0

    def __str__(self) -> str:
        return (
            f"GPipeStrategy was set up {self.setups} times: {self.piped} times a pipeline of two "
            f"stages ran, on {self.batches} mini-batches in all"
        )


class InjectedStrategy(GPipeStrategy):
    """A pipeline of two stages and two micro-batches in any LightningModule.

    Args:
        runs: Counts what runs.
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__([1, 1], 2, verify=False)  # the tests count calls
        self._counted = runs
        self._undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self._restore()
        path, self._undo = staged(self.lightning_module)
        balance = "parameters" if self._undo is None else [1, 1]
        self.options = replace(self.options, module=path, balance=balance)
        self._processes.options = self.options
        self._counted.setups += 1
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        if self.pipeline is not None:
            ran = sum(piped.runs for piped in self.pipeline.piped_modules)
            self._counted.batches += ran
            self._counted.piped += ran > 0
        super().teardown()
        self._restore()

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None


def staged(root: nn.Module) -> tuple[str, Callable[[], None] | None]:
    """Find or make something that two stages can run.

    Returns:
        Its path in ``root``, and what restores ``root``; None if nothing was changed.
    """
    for path, module in candidates(root).items():
        if isinstance(module, nn.Sequential) and len(module) > 1:
            return path, None
    linears = {path: module for path, module in root.named_modules() if type(module) is nn.Linear}
    if not linears:
        root.add_module(_BESIDE, nn.Sequential(nn.Identity(), nn.Identity()))
        return _BESIDE, lambda: delattr(root, _BESIDE)
    path, linear = max(linears.items(), key=lambda each: each[1].weight.numel())
    linear.__class__ = StagedLinear
    linear.enter, linear.leave = nn.Identity(), nn.Identity()

    def undo() -> None:
        del linear.enter, linear.leave
        linear.__class__ = nn.Linear

    return path, undo


def injected(choose: Choose, runs: Runs) -> Choose:
    """The strategy of a Trainer that names none: a pipeline, if it is for one CPU.

    Args:
        choose: How Lightning chooses.
        runs: Counts what runs.
    """
    torch.overrides.is_tensor_method_or_property(Tensor.add)  # cached before a test mocks a method

    def chosen(connector: _AcceleratorConnector) -> Any:
        strategy = choose(connector)
        if not isinstance(strategy, SingleDeviceStrategy) or strategy.root_device.type != "cpu":
            return strategy
        connector._parallel_devices = [torch.device("cpu")] * 2  # a thread for each stage
        return InjectedStrategy(runs)

    return chosen

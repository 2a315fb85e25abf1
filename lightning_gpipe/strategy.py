"""GPipeStrategy: a LightningModule whose nn.Sequential runs as a pipeline, in one process.

Lightning's strategies assume one device per process. Here one process drives several, and nearly
every override below undoes that assumption: where tensors are created, where modules and optimizer
states are put, what is saved. The *root device*, where the batch, the loss, the metrics and all
modules outside the pipeline live, is the last stage's, so that an unchanged ``training_step``
meets the output where its targets are; the pipeline moves its own input to the first stage.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.core.balance import balance_by_parameters
from lightning_gpipe.core.locate import locate
from lightning_gpipe.core.partition import check_balance
from lightning_gpipe.core.pipeline import GPipe, check_chunks
from lightning_gpipe.core.placement import on_meta, place_around
from lightning_gpipe.core.pytree import map_tensors
from lightning_gpipe.core.recompute import check_mode
from lightning_gpipe.core.swap import install, remove

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CHUNKS_PER_STAGE = 4  # Huang et al., "GPipe" (2019), section 2.3: the bubble is negligible


class GPipeStrategy(ParallelStrategy):
    """Runs the nn.Sequential inside a LightningModule as a GPipe pipeline over ``devices``.

    Args:
        balance: The number of layers in each stage, or ``"parameters"`` to give each device one
            stage so that the largest has as few parameters as possible. There may be several stages
            per device: stage j is on device j mod d.
        chunks: The number of micro-batches that a batch is cut into; None takes 4 per stage, which
            makes the idle time small. A batch with fewer rows makes fewer.
        module: The path of the nn.Sequential in the LightningModule, such as ``"net.layers"``. None
            finds the only one, or the one with more than half of all parameters.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, a number the first so many.
        deferred_batch_norm: Whether batch norms update their running statistics once per batch, as
            on one device, instead of once per micro-batch.
        threads: Whether each device has a thread of its own. False runs everything on the main
            thread in the schedule's order, for a debugger.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    strategy_name = "gpipe"

    def __init__(
        self,
        balance: list[int] | Literal["parameters"] = "parameters",
        chunks: int | None = None,
        *,
        module: str | None = None,
        activation_checkpointing: Literal["always", "except_last", "never"] | int = "except_last",
        deferred_batch_norm: bool = True,
        threads: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(balance, str):
            if balance != "parameters":
                raise ValueError(f"balance must be 'parameters' or a list: got {balance!r}.")
        else:
            check_balance(balance)
        if chunks is not None:
            check_chunks(chunks)
        check_mode(activation_checkpointing)
        self._balance = balance
        self._chunks = chunks
        self._module = module
        self._activation_checkpointing = activation_checkpointing
        self._deferred_batch_norm = deferred_batch_norm
        self._threads = threads
        self._pipeline: GPipe | None = None
        self._sequential: nn.Sequential | None = None

    @property
    def pipeline(self) -> GPipe | None:
        """The pipeline, from ``setup`` to ``teardown``; None before and after."""
        return self._pipeline

    # One process.

    @property
    def is_distributed(self) -> bool:
        """False: one process sees every batch."""
        return False

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def num_nodes(self) -> int:
        """The number of machines: 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                "GPipeStrategy drives the devices of one machine from one process: got "
                f"Trainer(num_nodes={num_nodes}). Write num_nodes=1."
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def barrier(self, name: str | None = None) -> None:
        pass

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    # Several devices.

    @property
    @override
    def root_device(self) -> torch.device:
        """The last stage's device."""
        return self._devices[-1]

    @override
    def setup_environment(self) -> None:
        _check_environment(self)
        super().setup_environment()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._set_up_pipeline()
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for optimizer in self.optimizers:
            _follow_parameters(optimizer)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None and self._sequential is not None
        place_around(self.lightning_module, self._sequential, self.root_device)

    @override
    def teardown(self) -> None:
        if self._sequential is not None:
            remove(self._sequential)
        if self._pipeline is not None:
            self._pipeline.close()
        self._sequential = self._pipeline = None
        module = self._lightning_module
        if module is not None and on_meta(module):
            self._lightning_module = None  # setup failed: there is nothing to move to the CPU
        super().teardown()
        self._lightning_module = module

    def __getstate__(self) -> dict[str, Any]:
        # A pickled or deep-copied model refers to its trainer, and so to its strategy.
        return {**self.__dict__, "_pipeline": None, "_sequential": None}

    @property
    def _devices(self) -> list[torch.device]:
        assert self.parallel_devices, "the Trainer sets the devices"
        return self.parallel_devices

    def _set_up_pipeline(self) -> None:
        assert self.lightning_module is not None
        path, sequential = locate(self.lightning_module, self._module)
        balance = self._balance
        if balance == "parameters":
            balance = balance_by_parameters(sequential, len(self._devices))
        check_balance(balance, len(sequential), f"{type(self.lightning_module).__name__}.{path}")
        _check_devices(len(balance), len(self._devices))
        self._pipeline = GPipe(
            sequential,
            balance,
            devices=self._devices,
            chunks=self._chunks or _CHUNKS_PER_STAGE * len(balance),
            activation_checkpointing=self._activation_checkpointing,
            deferred_batch_norm=self._deferred_batch_norm,
            threads=self._threads,
        )
        self._sequential = sequential
        install(sequential, self._pipeline)

    # Plain checkpoints.

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(_on_cpu(checkpoint), filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        # What has no memory yet cannot be copied into; it takes the loaded tensors instead.
        options = {"assign": True} if on_meta(self.lightning_module) else {}
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict, **options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)  # puts each state on its parameter's device


def _follow_parameters(optimizer: Optimizer) -> None:
    """Move the state of an optimizer that was used before to where its parameters are now."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _on_cpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with all tensors on the CPU, so that it loads on any machine."""
    moved: dict[str, Any] = map_tensors(lambda tensor: tensor.cpu(), checkpoint)
    metadata = getattr(checkpoint.get("state_dict"), "_metadata", None)
    if metadata is not None:
        moved["state_dict"]._metadata = metadata
    return moved


def _check_environment(strategy: GPipeStrategy) -> None:
    """Refuse what the Trainer was given and the pipeline cannot honour."""
    kinds = {device.type for device in strategy._devices}
    if not kinds <= {"cpu", "cuda"}:
        raise ValueError(
            "GPipeStrategy runs on Trainer(accelerator='cpu') and Trainer(accelerator='gpu') with "
            f"CUDA devices: got {sorted(kinds)}."
        )
    environment = strategy.cluster_environment
    if environment is not None and environment.creates_processes_externally:
        processes = environment.world_size()
        if processes > 1:
            raise RuntimeError(
                "GPipeStrategy drives all its devices from one process: "
                f"{type(environment).__name__} started {processes}, and each would run a pipeline "
                "of its own. Start the script with python, without torchrun or several tasks."
            )
    if strategy._layer_sync is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) makes batch norms agree between processes, and a "
            "pipeline has one process: leave it out. deferred_batch_norm=True, the default, keeps "
            "their running statistics those of the whole batch."
        )


def _check_devices(stages: int, devices: int) -> None:
    """Refuse a number of devices that does not fit the number of stages."""
    auto = (
        "devices='auto' means one device on the CPU and in a notebook, and all GPUs elsewhere: "
        f"write devices={stages} for a device per stage."
    )
    if stages % devices:
        raise ValueError(
            "the balance must have as many stages as Trainer(devices=...) has devices, or a "
            f"multiple of that: got {stages} stages for {devices} devices. {auto}"
        )
    if devices == 1 < stages:
        rank_zero_warn(
            f"All {stages} stages of the pipeline share one device, so nothing runs at the same "
            f"time. {auto}"
        )

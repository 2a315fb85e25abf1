"""GPipeStrategy: a LightningModule of which a module runs as a pipeline, in one process.

Lightning's strategies assume one device per process. Here one process drives several, and nearly
every override below removes that assumption: where tensors are created, where modules and optimizer
states are put, what is saved. The *root device*, which has the batch, the loss, the metrics and all
modules outside of the pipeline, is the last stage's, so that an unchanged ``training_step`` gets
the output on the device of its targets; the pipeline moves its own input to the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.averages import Averages
from lightning_gpipe.checkpoint_io import follow_parameters, load_state, on_cpu
from lightning_gpipe.core.data import MicroBatching, check_chunks, check_microbatching
from lightning_gpipe.core.frontends import is_installed, locate, on_meta
from lightning_gpipe.core.pipeline import GPipe, Taken, balance_for, taken_at
from lightning_gpipe.core.plan import (
    check_activation_checkpointing,
    check_balance,
    check_even,
    count_recomputed,
)
from lightning_gpipe.core.run import explain_second_backward
from lightning_gpipe.core.verify import Parity
from lightning_gpipe.finetuning import Finetuning
from lightning_gpipe.guarded_log import GuardedLogs
from lightning_gpipe.one_process import OneProcess
from lightning_gpipe.piped import Piped
from lightning_gpipe.refusals import (
    AUTO_DEVICES,
    metrics_on_meta,
    refuse_devices,
    refuse_global_pruning,
    refuse_joined_gradients,
    refuse_layer_sync,
    refuse_metrics_on_meta,
    refuse_metrics_with_lists,
    refuse_several_processes,
    warn_of_one_device,
)
from lightning_gpipe.watch import Watch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CHUNKS_PER_STAGE = 4  # Huang et al., "GPipe" (2019), section 2.3: the bubble is negligible


class GPipeStrategy(OneProcess):
    """Runs a module inside a LightningModule as a GPipe pipeline over ``devices``.

    An nn.Sequential runs its layers one after another; of an nn.ModuleList that a forward loops
    over, and of any other module, whose forward is traced, the layers run as that forward calls
    them.

    Args:
        balance: The number of layers in each stage, or the names of modules where stages begin, or
            ``"parameters"`` to give each device one stage so that the largest has as few parameters
            as possible. There may be several stages per device: stage j is on device j mod d.
        chunks: The number of micro-batches that a batch is split into; None takes 4 per stage,
            which makes the bubble small. A batch with fewer rows makes fewer.
        module: The path of the module in the LightningModule, such as ``"net.layers"``. None finds
            the nn.Sequential or nn.ModuleList with more than half of all parameters, or the only
            nn.Sequential.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, an integer k the first k.
        deferred_batch_norm: Whether batch norms update their running statistics once per batch, as
            on one device, instead of once per micro-batch.
        microbatching: Another way to split batches than along dim 0, such as ``Rows(dim=1)`` or
            :class:`~lightning_gpipe.core.data.microbatch.padded.PaddedSequences`.
        threads: Whether each device has a thread of its own. False runs everything on the main
            thread in the schedule's order, for a debugger.
        verify: Whether to compare the pipeline with a plain run on the first training batch; this
            has no effect on training. If output, gradients or buffers differ, a RuntimeError names
            the layer; a difference with a known reason, such as a batch norm, is a warning. The
            plain run needs the memory of a whole batch without recomputation, spread over the
            devices.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    strategy_name = "gpipe"

    def __init__(
        self,
        balance: list[int] | list[str] | Literal["parameters"] = "parameters",
        chunks: int | None = None,
        *,
        module: str | None = None,
        activation_checkpointing: Literal["always", "except_last", "never"] | int = "except_last",
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        threads: bool = True,
        verify: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(balance, str):
            if balance != "parameters":
                raise ValueError(f"balance must be 'parameters' or a list: got {balance!r}.")
        elif not _are_names(balance):
            check_balance(cast("list[int]", balance))  # or whatever else was given
        if chunks is not None:
            check_chunks(chunks)
        check_activation_checkpointing(activation_checkpointing)
        check_microbatching(microbatching)
        self._balance = balance
        self._chunks = chunks
        self._module = module
        self._activation_checkpointing = activation_checkpointing
        self._deferred_batch_norm = deferred_batch_norm
        self._microbatching = microbatching
        self._threads = threads
        self._verify = verify
        self._piped: Piped | None = None
        self._averages = Averages()
        self._finetuning = Finetuning()
        self._watch: Watch | None = None
        self._logs = GuardedLogs()

    @property
    def pipeline(self) -> GPipe | None:
        """The pipeline, from ``setup`` to ``teardown``; None before and after."""
        return None if self._piped is None else self._piped.pipeline

    # Several devices.

    @property
    @override
    def root_device(self) -> torch.device:
        """The last stage's device."""
        return self._devices[-1]

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        refuse_devices(self._devices)
        refuse_several_processes(self.cluster_environment)
        refuse_layer_sync(self._layer_sync)
        super().setup_environment()
        self._averages.hold_back(self.lightning_module)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._set_up_pipeline()
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_recomputed_metrics()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for optimizer in self.optimizers:
            refuse_joined_gradients(optimizer)
            follow_parameters(optimizer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        refuse_global_pruning(callbacks)
        self._finetuning.adapt(callbacks)
        self._averages.follow(self.lightning_module)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        self._averages.follow_in_epoch(self.lightning_module)

    @override
    def model_to_device(self) -> None:
        assert self._piped is not None
        self._piped.place_around()

    @override
    def teardown(self) -> None:
        if self._piped is not None:
            self._piped.remove()
        self._logs.release()
        self._averages.release()
        self._finetuning.release()
        self._piped = self._watch = None
        module = self._lightning_module
        if module is not None and _must_stay(module):
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module

    @property
    def _devices(self) -> list[torch.device]:
        assert self.parallel_devices, "the Trainer sets the devices"
        return self.parallel_devices

    def _set_up_pipeline(self) -> None:
        module = self.lightning_module
        assert module is not None
        refuse_metrics_on_meta(module)
        taken = taken_at(module, *locate(module, self._module))
        balance = self._balance_for(taken)
        self._piped = Piped(
            taken,
            balance,
            self._devices,
            _report if self._verify else None,
            chunks=self._chunks or _CHUNKS_PER_STAGE * len(balance),
            activation_checkpointing=self._activation_checkpointing,
            deferred_batch_norm=self._deferred_batch_norm,
            microbatching=self._microbatching,
            threads=self._threads,
        )
        rank_zero_info(str(self._piped))
        self._watch = Watch(module, taken.path, self._piped)
        self._logs.guard(module)

    def _refuse_recomputed_metrics(self) -> None:
        assert self._piped is not None and self.lightning_module is not None
        if count_recomputed(self._activation_checkpointing, self._piped.pipeline.chunks):
            refuse_metrics_with_lists(self.lightning_module, self._piped.taken.module)

    def _balance_for(self, taken: Taken) -> Sequence[int]:
        devices = len(self._devices)
        balance = balance_for(taken, self._balance, devices)
        check_balance(balance, len(taken.units), taken.name)
        check_even(len(balance), devices, f"Write Trainer(devices={len(balance)}). {AUTO_DEVICES}")
        warn_of_one_device(len(balance), devices)
        return balance

    # The pipeline ran, or the user is told.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._watch is not None and self.lightning_module is not None
        step = partial(super().training_step, *args, **kwargs)
        return self._watch.training(step, automatic=self.lightning_module.automatic_optimization)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    def _evaluate(
        self, name: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._watch is not None
        return self._watch.evaluation(name, partial(step, *args, **kwargs))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        except RuntimeError as error:
            explain_second_backward(error)
            raise

    # Plain checkpoints.

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(on_cpu(checkpoint), filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)  # puts each state on its parameter's device


def _are_names(balance: Any) -> bool:
    return isinstance(balance, list) and bool(balance) and all(isinstance(b, str) for b in balance)


def _must_stay(module: nn.Module) -> bool:
    """Whether the module cannot be moved, or must not be.

    Setup has failed: tensors are on the meta device, or another Trainer's pipeline is in use.
    """
    pipelined = any(map(is_installed, module.modules()))
    return pipelined or on_meta(module) or bool(metrics_on_meta(module))


def _report(parity: Parity) -> None:
    """Report the result of ``verify`` to the user.

    Raises:
        RuntimeError: If there is a difference without a known reason.
    """
    parity.check()
    if parity.difference is None and not parity.asides:
        rank_zero_info(str(parity))
    else:
        rank_zero_warn(str(parity))

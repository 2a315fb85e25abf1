"""GPipeStrategy: a LightningModule of which a module runs as a pipeline.

Lightning's strategies assume one device per process. Here one process may drive several, and nearly
every override below removes that assumption: where tensors are created, where modules and optimizer
states are put, what is saved. The *root device*, which has the batch, the loss, the metrics and all
modules outside of the pipeline, is the last stage's unless the user says the first's, so that an
unchanged ``training_step`` gets the output on the device of its targets; the pipeline moves its own
input to the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.adapted import AdaptedTrainer
from lightning_gpipe.checkpoint_io import (
    follow_parameters,
    load_state,
    load_values,
    to_cpu,
)
from lightning_gpipe.compilation import Compilation, check_compile
from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.frontends import undispatch
from lightning_gpipe.core.pipeline import GPipe, Taken, balance_of_each
from lightning_gpipe.core.plan import ScheduleName
from lightning_gpipe.core.run import explain_second_backward
from lightning_gpipe.core.show import show
from lightning_gpipe.core.transport import Twins
from lightning_gpipe.kept_balance import KeptBalance
from lightning_gpipe.optimizer_state import state_follows
from lightning_gpipe.piped import Piped, must_stay, taken_of
from lightning_gpipe.processes import (
    Mode,
    OverProcesses,
    StartMethod,
    Terms,
    check_processes,
)
from lightning_gpipe.refusals import (
    refuse_devices,
    refuse_global_pruning,
    refuse_in_parts,
    refuse_joined_gradients,
    refuse_layer_sync,
    refuse_metrics_on_meta,
    refuse_over_processes,
    refuse_precision,
    refuse_recomputed_metrics,
    refuse_verification,
)
from lightning_gpipe.sampled import entries_in, optimizers_of
from lightning_gpipe.settings import Settings
from lightning_gpipe.steps import check_schedule, checkpointing_for
from lightning_gpipe.typed import typed
from lightning_gpipe.user_steps import UserSteps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GPipeStrategy(OverProcesses):
    """Runs a module inside a LightningModule as a GPipe pipeline over ``devices``.

    An nn.Sequential runs its layers one after another; of an nn.ModuleList that a forward loops
    over, and of any other module, whose forward is traced, the layers run as that forward calls
    them.

    Args:
        balance: The number of layers in each stage, or the names of modules where stages begin.
            There may be several stages per device: stage j is on device j mod d. Or what to go by,
            with one stage per device: ``"parameters"``, so that the largest stage has as few
            parameters as possible, what is around the pipeline included; ``"time"``, so that the
            slowest stage is as fast as possible; ``"memory"``, so that the largest stage needs as
            few bytes as possible, activations and optimizer state included. The last two measure
            each layer on the module's ``example_input_array`` or, in a fit, the first training
            batch; the balance is kept in checkpoints, and a run that is resumed takes it from
            there. ``"checkpoint"`` takes no other. For several modules, a balance for each, or one
            of these words for all.
        chunks: The number of micro-batches that a batch is split into; None takes 4 per stage,
            which makes the bubble small. A batch with fewer rows makes fewer. ``"auto"`` plans it:
            the layers are measured as for a balance by time, and what is predicted to be fastest is
            taken of what fits the devices.
        module: The path of the module in the LightningModule, such as ``"net.layers"``. None finds
            the nn.Sequential or nn.ModuleList with more than half of all parameters, or the only
            nn.Sequential. Several paths, such as ``["generator", "discriminator"]``, are a pipeline
            each, over the same devices and threads.
        schedule: What runs when. ``"fill_drain"`` runs all forwards, training_step's loss of the
            whole batch, and all backwards. With ``"1f1b"`` training_step is called for each
            micro-batch, so that backwards begin early and few micro-batches are alive at a time;
            the loss is their mean, weighted by rows, or by the ``"loss_weight"`` that training_step
            returns beside ``"loss"``. It needs automatic optimization, and the package greenlet.
            ``"zero_bubble"`` also splits backwards, so that devices wait less, and
            ``"zero_bubble_v"`` with two stages on each device for less still: it goes down the
            devices and back. ``"auto"`` plans it, as ``chunks``: it takes one of these if
            training_step may be called so, and never the last.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, an integer k the first k. ``"auto"`` plans it, as ``chunks``. None is
            ``"except_last"``, and ``"never"`` for schedules other than fill-drain.
        deferred_batch_norm: Whether batch norms update their running statistics once per batch, as
            on one device, instead of once per micro-batch.
        microbatching: Another way to split batches than along dim 0, such as ``Rows(dim=1)`` or
            :class:`~lightning_gpipe.core.data.microbatch.padded.PaddedSequences`.
        compile: Whether torch.compile compiles the layers, in place, each kind of layer once for
            micro-batches of any size; or a dict of torch.compile's options, such as
            ``{"fullgraph": True}``. The first training batch takes as long as that takes.
        threads: Whether each device has a thread of its own. False runs everything on the main
            thread in the schedule's order, for a debugger. ``"auto"`` finds the
            faster way in the first batches, and says which; the results are the same.
        split_backward: Whether the gradients of the weights are computed apart from those for which
            the stage before waits, so that it waits for less; see :class:`~lightning_gpipe.GPipe`.
            ``"auto"`` plans it, as ``chunks``.
        around: Which stage's device has what is around the pipeline, and the batch, the loss and
            the metrics: ``"last"`` or ``"first"``, see :class:`~lightning_gpipe.GPipe`.
        verify: Whether to compare the pipeline with a plain run on the first training batch; this
            has no effect on training. If output, gradients or buffers differ, a RuntimeError names
            the layer; a difference with a known reason, such as a batch norm, is a warning. The
            plain run needs the memory of a whole batch without recomputation, spread over the
            devices. With a loss for each micro-batch, the loss and the gradients of the whole batch
            are compared as well, and the error says what training_step is to return.
        processes: Which processes run the pipeline: ``"single"`` one, which drives all devices
            with threads; ``"per_stage"`` one for each device; ``"per_node"`` one on each machine,
            which drives its devices. With several, each runs the same code on the same batches,
            which the first one loads, and has the parameters of its own stages.
        timeout: How long processes wait for one another when they agree on something or save a
            checkpoint: patience, with one that lives and is slow.
        lost_after: After how long a process that was stopped, or that no network reaches any more,
            is lost, which ends the others with an error that names it. It does not matter how long
            one takes for its work. To start, processes have ten times as long. None is 30 seconds;
            only with several processes.
        process_group_backend: The backend of torch.distributed; None for what the devices need.
        start_method: How processes are started if torchrun or SLURM have not: ``"popen"`` runs the
            script again in each, ``"fork"`` is for notebooks, ``"spawn"`` and ``"forkserver"`` for
            scripts that must not be run again.
        replicas: How many pipelines train together, each on its part of the batches, over equally
            many devices; their gradients are averaged by DistributedDataParallel. With
            ``processes="single"`` each is a process.
        ddp: Options of DistributedDataParallel, such as ``{"bucket_cap_mb": 50}``.
        save_distributed_checkpoint: Whether a checkpoint is a folder, to which each process writes
            its part with torch.distributed.checkpoint, instead of a single file. Either kind is
            loaded, whatever this is.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    strategy_name = "gpipe"

    def __init__(
        self,
        balance: list[int]
        | list[str]
        | list[list[int]]
        | list[list[str]]
        | Literal["parameters", "time", "memory", "checkpoint"] = "parameters",
        chunks: int | Literal["auto"] | None = None,
        *,
        module: str | list[str] | None = None,
        schedule: ScheduleName | Literal["auto"] = "fill_drain",
        activation_checkpointing: Literal["always", "except_last", "never", "auto"]
        | int
        | None = None,
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        compile: bool | dict[str, Any] = False,
        threads: bool | Literal["auto"] = "auto",
        split_backward: bool | Literal["auto"] = False,
        verify: bool = False,
        around: Literal["last", "first"] = "last",
        processes: Mode = "single",
        timeout: timedelta = default_pg_timeout,
        lost_after: timedelta | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        replicas: int = 1,
        ddp: dict[str, Any] | None = None,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        self._typed = typed(GPipeStrategy, locals())
        check_processes(processes, start_method, lost_after, replicas)
        terms = Terms(processes, replicas, timeout, lost_after, process_group_backend, start_method)
        super().__init__(terms, save_distributed_checkpoint, ddp)
        if verify and processes != "single":
            refuse_verification(processes)
        check_schedule(schedule, processes, replicas)
        check_compile(compile)
        self._settings = Settings(
            balance=balance,
            chunks=chunks,
            module=module,
            schedule=schedule,
            activation_checkpointing=checkpointing_for(activation_checkpointing, schedule),
            deferred_batch_norm=deferred_batch_norm,
            microbatching=microbatching,
            threads=threads,
            split_backward=split_backward,
            verify=verify,
            around=around,
        )
        self._compilation = Compilation(compile)
        self._adapted = AdaptedTrainer()
        self._kept = KeptBalance()
        self._measured = False
        self._strict = True  # as a checkpoint is loaded
        self._piped: Piped | None = None
        self._twins: Twins | None = None
        self._steps: UserSteps | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._typed})"

    @property
    def pipeline(self) -> GPipe | None:
        """The pipeline, from ``setup`` to ``teardown``; None before and after."""
        return None if self._piped is None else self._piped.pipeline

    def measure_layers(self) -> None:
        """Measure what the layers cost at setup, whatever the balance goes by."""
        self._measured = True

    def rebalance(self, balance: list[int] | list[list[int]]) -> None:
        """Cut by another balance between two steps of a fit, and move the layers.

        The state of the optimizers follows their parameters, and so do averages of weights. A
        balance that is kept in checkpoints is this one then.

        Args:
            balance: The number of layers in each stage, of as many stages as there are; of several
                modules, a list for each.

        Raises:
            TypeError, ValueError: If the balance does not fit; nothing has changed then.
            RuntimeError: If there is no pipeline, or see :meth:`lightning_gpipe.GPipe.rebalance`.
        """
        if self._piped is None:
            raise RuntimeError("a pipeline is cut anew from setup to teardown: there is none now.")
        if self.is_distributed:
            raise RuntimeError(
                "replicas of a pipeline keep their balance, for their gradients are averaged stage "
                f"by stage: got rebalance({balance}). Give this balance to GPipeStrategy."
            )
        assert self.lightning_module is not None
        with state_follows(self.optimizers):
            self._piped.rebalance(balance)
        self._adapted.rebalance(self.lightning_module)
        self._kept.replace(self._piped.found, self._piped.pipeline.balances)

    @property
    def microbatching(self) -> MicroBatching | None:
        """As given."""
        return self._settings.microbatching

    @property
    def around(self) -> Literal["last", "first"]:
        """As given."""
        return self._settings.around

    @property
    def schedule(self) -> ScheduleName | Literal["auto"]:
        """As given."""
        return self._settings.schedule

    @property
    def split_backward(self) -> bool | Literal["auto"]:
        """As given."""
        return self._settings.split_backward

    def taken(self, module: LightningModule) -> list[Taken]:
        """What of a LightningModule would run as pipelines."""
        path = self._settings.module
        return taken_of(module, path, balance_of_each(path, "parameters"))

    # Several devices.

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of what is around the pipeline: that of the last stage, or of the first.

        Of the stages of this process, if there are several.
        """
        if self._piped is not None:
            return self._piped.outside
        first = self._settings.around == "first" or self._settings.folded
        return self._own_devices[0 if first else -1]

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._adapted.connect(model)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        refuse_devices(self._devices)
        refuse_layer_sync(self._layer_sync)
        refuse_precision(self.precision_plugin)
        super().setup_environment()
        self._adapted.setup_environment(self.lightning_module)

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
        spread = undispatch(self.lightning_module)
        self._set_up_pipeline(trainer)
        self.model_to_device()
        self.load_part(strict=self._strict)
        self.replicate()
        assert self._piped is not None
        if spread is not None:
            rank_zero_info(str(spread))
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_recomputed_metrics(self.lightning_module, self._piped.pipeline)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        if self.several:
            refuse_over_processes(callbacks, self.optimizers)
        if self._in_parts:
            refuse_in_parts(callbacks, self.checkpoint_io)
        self.train_together(self._piped.around(), self._piped.elsewhere())
        for optimizer in self.optimizers:
            refuse_joined_gradients(optimizer)
            follow_parameters(optimizer)
        refuse_global_pruning(callbacks)
        self._adapted.setup(
            self.lightning_module,
            callbacks,
            self._piped.pipeline,
            self._own_devices,
            workers=len(self._workers),
            replicas=self._replicas,
        )

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self._twins is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        with self._twins.moving():
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self._compilation.begin_batch()
        self.replicate_again()
        self._adapted.on_train_batch_start(self.lightning_module)

    @override
    def model_to_device(self) -> None:
        assert self._piped is not None
        self._piped.place_around()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._piped is not None:
            self._piped.pipeline.tell(exception)  # others would wait for this process
        self._adapted.on_exception()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._piped is not None:
            self._piped.remove()
        self._compilation.release()
        self.train_apart()
        self._adapted.teardown()
        self._piped = self._folder = self._twins = self._steps = None
        module = self._lightning_module
        if module is not None and must_stay(module):
            self._lightning_module = None
            if self.several:
                to_cpu(module)
        super().teardown()
        self._lightning_module = module

    def _set_up_pipeline(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        refuse_metrics_on_meta(module)
        given = self._settings
        self.compare(
            module,
            balance=given.balance,
            chunks=given.chunks,
            path=given.module,
            activation_checkpointing=given.activation_checkpointing,
            deferred_batch_norm=given.deferred_batch_norm,
            around=given.around,
        )
        self._compilation.begin(partial(self.taken, module))
        self._piped = piped = Piped(
            module,
            given,
            self._workers,
            schedule=self._allowed(module),
            kept=self._kept,
            agree=self.broadcast,
            measured=self._measured,
            sample=partial(entries_in, module, trainer),
            optimizers=partial(optimizers_of, module, trainer),
            owners=self._arrangement.owners,
            group=None if self._circles is None else self._circles.along,
            lost_after=None if self._arrangement.owners is None else self._lost_after,
        )
        self._twins = piped.pipeline.copy_batches(self.root_device)
        self.watch(piped.pipeline.engine)
        rank_zero_info(str(piped))
        if piped.pipeline.profiles and self.is_global_zero:
            show(piped.pipeline.listing())
        self._steps = UserSteps(module, piped, verify=given.verify)

    def _allowed(self, module: LightningModule) -> ScheduleName | Literal["auto"]:
        """What schedule there may be: a training_step that calls backward is for a whole batch."""
        free = self.schedule == "auto" and not module.automatic_optimization
        return "fill_drain" if free else self.schedule

    # The pipeline ran, or the user is told.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:  # the Trainer runs nothing, so nothing is piped
            return super().training_step(*args, **kwargs)
        return self._steps.training(super().training_step, self.precision_plugin, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation(super().predict_step, args, kwargs)

    def _evaluation(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._steps is None:
            return step(*args, **kwargs)
        return self._steps.evaluation(step.__name__, partial(step, *args, **kwargs))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        except RuntimeError as error:
            explain_second_backward(error)
            raise

    # Checkpoints that do not depend on the pipeline.

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(self._kept.save(checkpoint), filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self._kept.load(checkpoint)
        self._strict = strict
        if self._piped is None:  # else a callback restores what it has tried
            self.take_generators(checkpoint)
        if self._folder is None:
            load = load_state if self._piped is None else load_values
            load(self.lightning_module, checkpoint["state_dict"], strict=strict)
        elif self._piped is not None:  # else it is loaded once it is known what this process has
            self.load_part(strict=strict)

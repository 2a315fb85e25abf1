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
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.averages import Averages
from lightning_gpipe.checkpoint_io import (
    drop_foreign_states,
    follow_parameters,
    load_state,
    load_values,
    to_cpu,
)
from lightning_gpipe.compilation import Compilation, check_compile
from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.frontends import undispatch
from lightning_gpipe.core.pipeline import Given, GPipe, Taken, balance_of_each
from lightning_gpipe.core.plan import ScheduleName, check_around
from lightning_gpipe.core.run import check_threads, explain_second_backward
from lightning_gpipe.core.show import show
from lightning_gpipe.core.transport import Twins
from lightning_gpipe.device_monitors import DeviceMonitors
from lightning_gpipe.finetuning import Finetuning
from lightning_gpipe.guarded_log import GuardedLogs
from lightning_gpipe.kept_balance import KeptBalance
from lightning_gpipe.optimizer_state import state_follows
from lightning_gpipe.piped import Piped, must_stay, report, taken_of
from lightning_gpipe.processes import (
    InStep,
    Mode,
    OverProcesses,
    StartMethod,
    Terms,
    check_processes,
)
from lightning_gpipe.profiling import Profiling, profiler_of
from lightning_gpipe.refusals import (
    check_any_balance,
    check_module,
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
from lightning_gpipe.sharded import load_model, load_optimizer
from lightning_gpipe.steps import FOLDED, Steps, check_schedule, checkpointing_for
from lightning_gpipe.typed import typed
from lightning_gpipe.watch import Watches
from lightning_gpipe.whole_files import WholeFiles

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
            thread in the schedule's order, for a debugger. ``"auto"`` tries both in the first
            batches, and says which is faster; the results are the same.
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
        check_module(module)
        for each in balance_of_each(module, balance):
            check_any_balance(each)
        check_schedule(schedule, processes, replicas)
        activation_checkpointing = checkpointing_for(activation_checkpointing, schedule)
        number = 1 if chunks is None else chunks
        Given(number, activation_checkpointing, schedule, split_backward).check()
        check_microbatching(microbatching)
        check_around(around)
        check_threads(threads)
        check_compile(compile)
        self._balance = balance
        self._chunks = chunks
        self._module = module
        self._activation_checkpointing = activation_checkpointing
        self._deferred_batch_norm = deferred_batch_norm
        self._microbatching = microbatching
        self._threads = threads
        self._split_backward = split_backward
        self._verify = verify
        self._around: Literal["last", "first"] = around
        self._schedule = schedule
        self._steps: Steps | None = None  # with a loss for each micro-batch
        self._piped: Piped | None = None
        self._averages = Averages()
        self._finetuning = Finetuning()
        self._compilation = Compilation(compile)
        self._twins: Twins | None = None
        self._monitors = DeviceMonitors()
        self._profiling = Profiling()
        self._watch: Watches | None = None
        self._in_step: InStep | None = None  # with several processes
        self._logs = GuardedLogs()
        self._kept = KeptBalance()
        self._measured = False
        self._strict = True  # as a checkpoint is loaded

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
        self._averages.follow(self.lightning_module)
        self._kept.replace(self._piped.found, self._piped.pipeline.balances)

    @property
    def microbatching(self) -> MicroBatching | None:
        """As given."""
        return self._microbatching

    @property
    def around(self) -> Literal["last", "first"]:
        """As given."""
        return self._around

    @property
    def schedule(self) -> ScheduleName | Literal["auto"]:
        """As given."""
        return self._schedule

    @property
    def split_backward(self) -> bool | Literal["auto"]:
        """As given."""
        return self._split_backward

    def taken(self, module: LightningModule) -> list[Taken]:
        """What of a LightningModule would run as pipelines."""
        return taken_of(module, self._module, balance_of_each(self._module, "parameters"))

    # Several devices.

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of what is around the pipeline: that of the last stage, or of the first.

        Of the stages of this process, if there are several.
        """
        if self._piped is not None:
            return self._piped.outside
        first = self._around == "first" or self._schedule == FOLDED  # which is the last one's too
        return self._own_devices[0 if first else -1]

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._profiling.record_threads(profiler_of(model))

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        refuse_devices(self._devices)
        refuse_layer_sync(self._layer_sync)
        refuse_precision(self.precision_plugin)
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
        spread = undispatch(self.lightning_module)
        self._set_up_pipeline(trainer)
        self.model_to_device()
        self._load_part()
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
        self._finetuning.adapt(callbacks)
        devices = self._own_devices, self.root_device
        self._monitors.adapt(callbacks, *devices, len(self._workers), self._replicas)
        self._profiling.follow(profiler_of(self.lightning_module), self._piped.pipeline)
        self._averages.follow(self.lightning_module)

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
        self._averages.follow_in_epoch(self.lightning_module)

    @override
    def model_to_device(self) -> None:
        assert self._piped is not None
        self._piped.place_around()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._piped is not None:
            self._piped.pipeline.tell(exception)  # others would wait for this process
        self._profiling.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._piped is not None:
            self._piped.remove()
        self._compilation.release()
        self.train_apart()
        self._logs.release()
        self._averages.release()
        self._finetuning.release()
        self._monitors.release()
        self._profiling.release()
        self._piped = self._watch = self._folder = self._twins = self._steps = None
        self._in_step = None
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
        self.compare(
            module,
            balance=self._balance,
            chunks=self._chunks,
            path=self._module,
            activation_checkpointing=self._activation_checkpointing,
            deferred_batch_norm=self._deferred_batch_norm,
            around=self._around,
        )
        self._compilation.begin(partial(self.taken, module))
        self._piped = piped = Piped(
            module,
            self._module,
            self._balance,
            self._workers,
            chunks=self._chunks,
            around=self._around,
            verify=self._verify,
            kept=self._kept,
            measured=self._measured,
            sample=partial(entries_in, module, trainer),
            optimizers=partial(optimizers_of, module, trainer),
            activation_checkpointing=self._activation_checkpointing,
            schedule=self._allowed(module),
            deferred_batch_norm=self._deferred_batch_norm,
            microbatching=self._microbatching,
            threads=self._threads,
            split_backward=self._split_backward,
            folded=self._schedule == FOLDED,
            owners=self._arrangement.owners,
            group=None if self._circles is None else self._circles.along,
            lost_after=None if self._arrangement.owners is None else self._lost_after,
            agree=self.broadcast,
        )
        self._twins = piped.pipeline.copy_batches(self.root_device)
        self.watch(piped.pipeline.engine)
        rank_zero_info(str(piped))
        if piped.pipeline.profiles:
            show(piped.pipeline.listing())
        runs = {taken.path: partial(piped.runs_of, taken) for taken in piped.found}
        self._watch = Watches(module, runs)
        if piped.pipeline.layout.spread:
            self._in_step = InStep(module, piped.pipeline)
        if piped.schedule != "fill_drain":
            told = report if self._verify else None
            self._steps = Steps(piped.schedule, module, piped.pipeline, told)
        self._logs.guard(module)

    def _allowed(self, module: LightningModule) -> ScheduleName | Literal["auto"]:
        """What schedule there may be: a training_step that calls backward is for a whole batch."""
        free = self._schedule == "auto" and not module.automatic_optimization
        return "fill_drain" if free else self._schedule

    # The pipeline ran, or the user is told.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self._lightning_module
        assert self._watch is not None and self._piped is not None and module is not None
        step = partial(super().training_step, *args, **kwargs)
        if self._steps is not None:
            step = partial(self._steps.run, self.precision_plugin, *args, **kwargs)
        step = partial(self._watch.training, step, automatic=module.automatic_optimization)
        result = step() if self._in_step is None else self._in_step.training(step)
        self._piped.say_ways()
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", partial(super().test_step, *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", partial(super().predict_step, *args, **kwargs))

    def _evaluate(self, name: str, step: Callable[[], Any]) -> Any:
        assert self._watch is not None
        step = partial(self._watch.evaluation, name, step)
        return step() if self._in_step is None else self._in_step.evaluation(step)

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

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):  # such as an asynchronous one
            self._checkpoint_io.checkpoint_io = WholeFiles()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

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
            self._load_part()

    def _load_part(self) -> None:
        """Load what this process has of the model from a folder, if a checkpoint is one."""
        assert self.lightning_module is not None
        if self._folder is not None:
            load_model(self._folder, self.lightning_module, strict=self._strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        for k, (optimizer, state) in enumerate(states):
            if self._folder is not None:
                load_optimizer(self._folder, k, optimizer)
            else:
                optimizer.load_state_dict(state)  # puts each state on its parameter's device
                drop_foreign_states(optimizer)

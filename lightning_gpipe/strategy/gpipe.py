"""GPipeStrategy: a LightningModule of which a module runs as a pipeline.

Lightning's strategies assume one device per process. Here one process may drive several, and nearly
every override below, in Lightning's order, removes that assumption.

The *root device*, which has the batch, the loss, the metrics and all modules outside of the
pipeline, is the last stage's unless the user says the first's: so an unchanged ``training_step``
gets the output on the device of its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import rich
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.checkpoints import (
    drop_foreign_states,
    follow_parameters,
    state_follows,
    to_cpu,
)
from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.faithful import Journal, patched
from lightning_gpipe.core.frontends import remove_dispatch_hooks
from lightning_gpipe.core.pipeline import GPipe, PipedModule
from lightning_gpipe.core.run import refuse_second_backward
from lightning_gpipe.core.schedules import ScheduleName
from lightning_gpipe.distributed import (
    Mode,
    SharedLoader,
    is_without_values,
    refuse_world_size,
    shapes,
    unshare,
)
from lightning_gpipe.strategy.adapters.averages import Averages
from lightning_gpipe.strategy.adapters.methods import adapt_callbacks, guard_logs
from lightning_gpipe.strategy.adapters.profiling import Profiling, profiler_of
from lightning_gpipe.strategy.adapters.signals import Signals
from lightning_gpipe.strategy.checkpointing import Checkpoints, with_whole_files
from lightning_gpipe.strategy.compilation import compile_layers
from lightning_gpipe.strategy.last_outputs import LastOutputs
from lightning_gpipe.strategy.options import (
    StartMethod,
    StrategyOptions,
    refusing_unknown_arguments,
)
from lightning_gpipe.strategy.pipelined import PipelinedModule, must_stay, piped_modules_of
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.refusals import (
    check_environment,
    check_fit,
    check_synchronised,
    explain_meta,
    explain_shards,
    refuse_a_second_trainer,
    refuse_in_parts,
    refuse_metrics_on_meta,
    refuse_recomputed_metrics,
    refuse_sparse_gradients,
)
from lightning_gpipe.strategy.replicas.gradient_averaging import GradientAveraging
from lightning_gpipe.strategy.replicas.replicas import Replicas
from lightning_gpipe.strategy.replicas.sharding import Sharding
from lightning_gpipe.strategy.replicas.stage_shards import StageShards
from lightning_gpipe.strategy.resuming import MeasuredBalances, RandomStates
from lightning_gpipe.strategy.user_steps import UserSteps


class GPipeStrategy(ParallelStrategy):
    """Runs a module inside a LightningModule as a GPipe pipeline over ``devices``.

    Arguments that :class:`~lightning_gpipe.GPipe` has too are described in full there; here is what
    a Trainer adds.

    Args:
        balance: The number of layers in each stage, or the names of modules where stages begin, or
            a criterion. ``"time"`` and ``"memory"`` measure each layer on the module's
            ``example_input_array`` or, in a fit, the first training batch; checkpoints keep the
            balance, for runs that are resumed. ``"checkpoint"`` takes it from there only. Several
            modules have a balance each, or one criterion for all.
        chunks: The number of micro-batches of a batch. None is 4 per stage, which makes the bubble
            small. ``"auto"`` plans it.
        module: The path of the module in the LightningModule, such as ``"net.layers"``, or several
            paths, in the order of their calls where each micro-batch has a loss. None takes, of
            each child, the nn.Sequential or nn.ModuleList with nine tenths of the work, or else the
            whole child, if its forward can be traced.
        schedule: The order of forwards and backwards. ``"fill_drain"`` runs all forwards,
            training_step's loss of the whole batch, and all backwards. With all others
            training_step is called for each micro-batch, so that few of these are alive at a time;
            the loss is their mean, weighted by rows, or by the ``"loss_weight"`` that training_step
            returns beside ``"loss"``. They need automatic optimization, and the package greenlet:
            ``"1f1b"``; ``"zero_bubble"``, which splits backwards, so that devices wait less;
            ``"zero_bubble_v"``, with two stages on each device, for less still; so ``"v_half"`` and
            ``"v_min"``, with a half and a third of the activations of ``"1f1b"``; or a block,
            ``[[0, 3], [1, 2]]``, see :meth:`lightning_gpipe.GPipe.by_micro_batch`. ``"auto"`` plans
            it, as ``chunks``: where training_step allows them, ``"fill_drain"``, ``"1f1b"``,
            ``"zero_bubble"``, or a block for the measured costs.
        activation_checkpointing: The micro-batches that are recomputed. None is ``"except_last"``,
            and ``"never"`` for schedules other than fill-drain.
        deferred_batch_norm: Whether batch norms update their running statistics once per batch.
        microbatching: Another way to split batches than along dim 0.
        compile: Whether torch.compile compiles the layers, in place, each kind of layer once for
            micro-batches of any size; or a dict of torch.compile's options, such as
            ``{"fullgraph": True}``.
        threads: Whether each device has a thread of its own. ``"auto"`` finds the faster way.
        cores: The number of cores that devices on the CPU share.
        split_backward: Whether the gradients of weights are computed apart.
        around: The stage whose device has the modules around the pipeline, the batch, the loss and
            the metrics: ``"last"`` or ``"first"``.
        weights: The place of the stages' weights between their uses: ``"device"``, ``"host"``, or
            ``"auto"``, which plans it.
        offload_activations: Whether activations wait on the host, or how many micro-batches of each
            stage, as a list. ``"auto"`` plans it.
        verify: Whether to compare the pipeline with a plain run on the first training batch, which
            has no effect on training. If output, gradients or buffers differ, a RuntimeError names
            the layer; a difference with a known reason, such as a batch norm, is a warning. The
            plain run needs the memory of a whole batch without recomputation. With a loss for each
            micro-batch, the loss and the gradients of the whole batch are compared as well.
            ``"sample"`` compares four rows, unless the model is compiled or in several processes,
            or the fit is resumed. Either way four rows of the first batch of evaluation are, too,
            without gradients.
        processes: The processes of a pipeline: ``"single"`` one, which drives all devices with
            threads; ``"per_stage"`` one for each device; ``"per_node"`` one on each machine. With
            several, each runs the same code on the same batches, which the first one loads, and has
            the parameters of its own stages.
        outputs: The processes that get the outputs of the last stage, and run the user's step from
            its call of the pipeline to the loss: ``"all"``, or that of the ``"last"`` stage, which
            tells the others the loss and what was logged, and has the rest of the model.
            ``"auto"`` is ``"all"`` for up to eight processes, and ``"last"`` for more.
        timeout: The time that processes wait for a slow one, when they agree on something or save a
            checkpoint.
        lost_after: The time after which a process that was stopped, or that no network reaches, is
            lost. Only with several processes.
        process_group_backend: The backend of torch.distributed; None chooses by the devices. With
            NCCL, tensors go straight from GPU to GPU; ``"gloo"`` sends them over the host.
        start_method: The way to start processes unless torchrun or SLURM have started them:
            ``"popen"`` runs the script again in each, ``"fork"`` is for notebooks, ``"spawn"`` for
            scripts that must not be run again.
        replicas: The number of pipelines that train together, each on its part of the batches, over
            equally many devices. With ``processes="single"`` each is a process.
        tensor_parallel: The number of devices of each stage, each with a process, among which you
            divide its layers in ``configure_model``, by PyTorch's ``parallelize_module`` with
            ``self.device_mesh["tensor_parallel"]``. Only with ``processes="per_stage"``.
        ddp: Options of DistributedDataParallel, which averages the gradients of replicas, such as
            ``{"bucket_cap_mb": 50}``.
        sharding: The tensors that are divided among replicas, of which each has whole copies
            otherwise: ``"optimizer"`` for the states of the optimizers, ``"gradients"`` for these
            and the averaged gradients, ``"parameters"`` also for the parameters of stages, which
            come to a replica while the stage runs.
        save_distributed_checkpoint: Whether a checkpoint is a folder, to which each process writes
            its part with torch.distributed.checkpoint, instead of a single file. Either kind is
            loaded.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    strategy_name = "gpipe"

    # Construction.

    @refusing_unknown_arguments
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
        schedule: ScheduleName | Literal["auto"] | list[list[int]] = "fill_drain",
        activation_checkpointing: Literal["always", "except_last", "never", "auto"]
        | int
        | list[int]
        | None = None,
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        compile: bool | dict[str, Any] = False,
        threads: bool | Literal["auto"] = "auto",
        cores: int | None = None,
        split_backward: bool | Literal["auto"] = False,
        verify: bool | Literal["sample"] = "sample",
        around: Literal["last", "first"] = "last",
        weights: Literal["device", "host", "auto"] = "device",
        offload_activations: bool | Literal["auto"] | list[int] = False,
        processes: Mode = "single",
        outputs: Literal["all", "last", "auto"] = "auto",
        timeout: timedelta = default_pg_timeout,
        lost_after: timedelta | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        replicas: int = 1,
        tensor_parallel: int = 1,
        ddp: dict[str, Any] | None = None,
        sharding: Literal["optimizer", "gradients", "parameters"] | None = None,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        self.options = StrategyOptions.of(locals())
        self._processes = Processes(self.options)
        self._sharding = Sharding(self._processes)
        self._averaging = GradientAveraging(self._processes, self._sharding)
        self._replicas = Replicas(self._processes, self._sharding, self._averaging)
        self._stage_shards = StageShards(self._processes)
        super().__init__()
        self.num_nodes = 1  # a Trainer sets it
        # Not in the attribute of the base class, where a second Trainer would report another error.
        self._accelerator_of_trainer: Accelerator | None = None
        self._profiling = Profiling()
        self._signals = Signals(self._processes)
        self._changes = Journal()  # of the user's modules and callbacks, until teardown
        self._checkpoints = Checkpoints(self._processes, self._sharding)
        self._averages = Averages(self._checkpoints.module_state, self._checkpoints.in_parts)
        self._random_states = RandomStates(self._processes)
        self._measured_balances = MeasuredBalances()
        self._forward_redirection = _DDPForwardRedirection()
        self._measures_layers = False
        self._tries_sizes = False
        self._piped: PipelinedModule | None = None
        self._steps: UserSteps | None = None

    def __repr__(self) -> str:
        defaults = signature(GPipeStrategy).parameters.items()
        arguments = ((name, getattr(self.options, name), x.default) for name, x in defaults)
        changed = ", ".join(f"{name}={x!r}" for name, x, default in arguments if x != default)
        return f"{type(self).__name__}({changed})"

    @property
    def pipeline(self) -> GPipe | None:
        """The pipeline, from ``setup`` to ``teardown``; None before and after."""
        return None if self._piped is None else self._piped.pipeline

    @property
    def _root(self) -> LightningModule:
        assert self.lightning_module is not None, "it is connected before all hooks but __init__"
        return self.lightning_module

    def measure_layers(self) -> None:
        """Measure the cost of each layer at setup, whatever the balance goes by."""
        self._measures_layers = True

    def piped_modules(self, module: LightningModule, *, several: bool = True) -> list[PipedModule]:
        """Return the modules that would run as pipelines, or the largest one."""
        return piped_modules_of(module, self.options, several=several)

    def rebalance(self, balance: list[int] | list[list[int]]) -> None:
        """Cut by another balance between two steps of a fit, and move the layers.

        The state of the optimizers follows their parameters, and so do averages of weights.
        Checkpoints that keep a balance keep this one from then on. All replicas call this together.
        See :meth:`lightning_gpipe.GPipe.rebalance` for the argument and the errors.

        Raises:
            RuntimeError: If there is no pipeline.
        """
        if self._piped is None:
            raise RuntimeError("a pipeline is cut anew from setup to teardown: there is none now.")
        pipeline = self._piped.pipeline
        move, move_back = (partial(self._cut, each) for each in (balance, pipeline.balance))
        self._processes.check_same({"balance of rebalance()": balance})
        self._sharding.gather_parameters(self._root, self.root_device)
        try:
            self._processes.do_or_undo(move, move_back)
        finally:
            if self.is_distributed:
                self._sharding.divide_parameters(self._root, self._piped)
                self._wrap()
        self._averages.follow(self._root)
        self._measured_balances.replace(self._piped.modules, pipeline.balances)

    def _cut(self, balance: Any) -> None:
        assert self.pipeline is not None, "it is set up"
        with state_follows(self.optimizers):
            self.pipeline.rebalance(balance)

    def _wrap(self) -> None:
        """Let replicas average the gradients of the present parameters."""
        self.model = self._root  # the old wrapper goes first
        assert self._piped is not None, "it is set up"
        with self._averaging.in_step():
            self.model = self._averaging.wrapped(self._root, self._piped.around())

    def grad_norm(
        self, module: nn.Module, norm_type: float = 2.0, group_separator: str = "/"
    ) -> dict[str, float]:
        """Return the norms of the gradients of all stages, as Lightning's ``grad_norm`` names them.

        That of lightning.pytorch.utilities has the gradients of the stages of one process. All
        processes call this together, as in ``on_before_optimizer_step``.

        Args:
            module: The LightningModule, or a module in it.
            norm_type: The kind of norm, such as ``float("inf")``.
            group_separator: The text between ``grad_2.0_norm`` and the name of a parameter.
        """
        return self._replicas.grad_norm(module, float(norm_type), group_separator)

    # The Trainer and its environment.

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator_of_trainer

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator) -> None:
        refuse_a_second_trainer(self._accelerator_of_trainer)
        self._accelerator_of_trainer = accelerator

    @property
    def num_processes(self) -> int:
        return self._processes.arrangement.on_each_node

    @property
    @override
    def world_size(self) -> int:
        """The number of processes, of which those of one pipeline share their batches."""
        self._replicas.world_size_calls.note("trainer.world_size")
        return self._processes.arrangement.world_size

    @property
    @override
    def global_rank(self) -> int:
        return self._processes.global_rank

    @property
    @override
    def local_rank(self) -> int:
        return self._processes.local_rank

    @property
    @override
    def node_rank(self) -> int:
        return self._processes.node_rank

    @property
    def data_parallel_size(self) -> int:
        """The number of pipelines: of the parts into which rows are divided."""
        return self.options.replicas

    @property
    def data_parallel_rank(self) -> int:
        """The number of this process's pipeline, and of its part of the rows."""
        return self._processes.replica

    @property
    def is_distributed(self) -> bool:
        return self._processes.replicated

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The processes, by replica, place in a pipeline and shard of a stage; None for one.

        The dimensions are ``data_parallel``, ``pipeline_parallel`` and ``tensor_parallel``.
        """
        return None if self._processes.groups is None else self._processes.groups.mesh

    def all_in_pipeline(self, value: Any) -> list[Any]:
        """Return the values of the processes of this pipeline, which all call this together."""
        group = self._processes.pipeline_group
        return [value] if group is None else group.all(value)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    @override
    def root_device(self) -> torch.device:
        if self._piped is not None:
            return self._piped.pipeline.layout.outside
        first = self.options.around == "first" or self._processes.folded
        return self._processes.own_devices[0 if first else -1]

    def set_world_ranks(self) -> None:
        devices, environment = self.parallel_devices, self.cluster_environment
        self._processes.place(devices or [], self.num_nodes, environment)

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self._processes.launcher(self, self._tell, self._checkpoints.fetch)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if model._trainer is not None:
            self._profiling.record_threads(profiler_of(model))

    @override
    def setup_environment(self) -> None:
        synchronised = self._layer_sync is not None
        check_environment(self._processes.devices, self.precision_plugin)
        if synchronised:
            check_synchronised(self._layer_sync, self.options)
        self._processes.connect(self.root_device, synchronised=synchronised)
        for divided in (self._root, *self._averages.left_by_a_fit(self._root)):
            self._sharding.gather_parameters(divided, self.root_device)
        self._root._device_mesh = self.device_mesh
        super().setup_environment()
        self._profiling.record_threads(profiler_of(self._root))
        self._averages.hold_back(self._root)

    # Setup.

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        device = torch.device("meta") if empty_init else nullcontext()
        # This surrounds configure_model. An override of what Lightning has for fully_shard there
        # would make Trainer.init_module warn.
        undoing = self._sharding.undoing_fully_shard(self._lightning_module)
        with device, self.precision_plugin.tensor_init_context(), undoing:
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        module, processes = self._root, self._processes
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        remove_dispatch_hooks(module)
        refuse_metrics_on_meta(module)
        processes.check_same(shapes(module))
        self._changes = changes = Journal()  # a new one: a fork abandons those that exist
        if self.options.compile is not False:
            compile_layers(self.piped_modules(module), self.options.compile, changes)
        self._piped = piped = PipelinedModule(
            trainer, processes, self._measured_balances, measured=self._measures_layers
        )
        processes.watch(piped.pipeline.engine)
        self._replicas.synchronise(piped)
        rank_zero_info(str(piped))
        if piped.pipeline.profiles and self.is_global_zero:
            rich.print(piped.pipeline.listing())
        self.model_to_device()
        self._checkpoints.load_part(module)
        self._stage_shards.equalise(module)
        self._set_up_fit(trainer, piped)
        self.setup_precision_plugin()
        self._check_trainer(trainer, piped)
        self._checkpoints.elsewhere = piped.elsewhere()
        self._replicas.begin(self.precision_plugin, piped)
        self._stage_shards.begin(module, self.optimizers)
        for optimizer in self.optimizers:
            follow_parameters(optimizer)
        if trainer.state.fn == TrainerFn.FITTING:  # else they have the shares of the last fit
            self._sharding.divide_optimizers(self.optimizers, self._averaging.in_step)
        last: LastOutputs | None = None
        if processes.at_last:
            last = LastOutputs(module, piped, processes, self._replicas.at_ends, changes)
        self._steps = UserSteps(
            module, piped, verify=self.options.verified, in_wrapper=self._in_wrapper, last=last
        )
        self._adapt(trainer, piped)

    def _set_up_fit(self, trainer: Trainer, piped: PipelinedModule) -> None:
        """Give replicas the same values and, in a fit, their shares, and make the optimizers."""
        module, fits = self._root, trainer.state.fn == TrainerFn.FITTING
        if self.is_distributed:
            self._wrap()
            if fits:
                self._sharding.divide_parameters(module, piped)
        if fits:
            refuse_recomputed_metrics(module, piped.pipeline)
            if self._averaging.without_wrapper:
                refuse_sparse_gradients(module)
            self.setup_optimizers(trainer)

    def _check_trainer(self, trainer: Trainer, piped: PipelinedModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        check_fit(
            callbacks,
            self.optimizers,
            split=self._processes.split,
            sharded=self.options.sharding is not None,
            divided=self.options.divides_parameters,
            on_host=bool(piped.pipeline.layout.away_from_weights),
        )
        self._tries_sizes = any(isinstance(each, BatchSizeFinder) for each in callbacks)
        if self.options.save_distributed_checkpoint:
            refuse_in_parts(callbacks, self.checkpoint_io)

    def _adapt(self, trainer: Trainer, piped: PipelinedModule) -> None:
        """Adapt what assumes one device per process, until teardown."""
        module, changes, options = self._root, self._changes, self.options
        guard_logs(module, changes, split=self._processes.split or options.divides_gradients)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        split = self._processes.split or options.divides_parameters
        layout = piped.pipeline.layout
        adapt_callbacks(callbacks, changes, layout, self.data_parallel_size, split=split)
        self._signals.follow(trainer, changes)
        self._profiling.follow(profiler_of(module), piped.pipeline)
        self._averages.follow(module)

    @override
    def model_to_device(self) -> None:
        pass  # the pipelines have moved all of it

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._random_states.process_dataloader(dataloader, self._root.trainer)
        group = self._processes.replica_group
        if group is None:
            return dataloader
        refuse_world_size(dataloader, self.world_size, self.data_parallel_size)
        _auto_add_worker_init_fn(dataloader, self.data_parallel_rank)
        return SharedLoader(dataloader, group, self._readers)

    def _readers(self) -> Collection[int] | None:
        predicts = self._root.trainer.state.fn == TrainerFn.PREDICTING
        return None if predicts or self._steps is None else self._steps.readers

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        processes = self._processes
        if processes.groups is not None and processes.at_last and is_without_values(batch):
            return batch
        return super().batch_to_device(batch, *args, **kwargs)

    # Backward.

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            if self._processes.groups is None or self._piped is None:
                return super().backward(*args, **kwargs)
            engine, averaging = self._piped.pipeline.engine, self._averaging
            leaving_early = averaging.leaving_early(loss=args[0])
            with averaging.in_step(), engine.telling(), leaving_early:
                return super().backward(*args, **kwargs)
        except RuntimeError as error:
            refuse_second_backward(error)
            raise

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._tries_sizes:
            return super().optimizer_step(*args, **kwargs)
        return self._processes.agree_on_memory(partial(super().optimizer_step, *args, **kwargs))

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._replicas.before_backward()
        by_itself = self._root.automatic_optimization  # then DDP's forward has done it
        if isinstance(self.model, DistributedDataParallel) and not by_itself:
            prepare_for_backward(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._processes.groups is None:
            return
        self._stage_shards.after_backward()
        if self._replicas.after_backward(None if self._steps is None else self._steps.last):
            for optimizer in self.optimizers:
                drop_foreign_states(optimizer)
            self._averages.follow(self._root)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._averaging.accumulating(), super().block_backward_sync():
            yield

    # The user's steps.

    @override
    def on_train_start(self) -> None:
        self._random_states.on_train_start(self._root.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        if self.is_distributed and self._averaging.outdated(self._root, self.model):
            self._wrap()
        self._averages.follow_in_epoch(self._root)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:  # the Trainer runs nothing, so nothing is piped
            return super().training_step(*args, **kwargs)
        step = partial(self._steps.training, super().training_step, self.precision_plugin)
        if self._processes.groups is None:
            return step(args, kwargs)
        trainer, averaging = self._root.trainer, self._averaging
        added = bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches)
        leaving_early = averaging.leaving_early(adds=added)
        with averaging.in_step(), self._replicas.synchronising(), leaving_early:
            return step(args, kwargs)

    def _in_wrapper(self, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``, called in the forward of the module's wrapper, if any."""
        assert self.model is not None
        if self.model is self._root:
            return run()
        # Lightning looks the method up by its name.
        with patched([(vars(self._root), "run_micro_batches", run)]):
            return self._forward_redirection(self.model, self._root, "run_micro_batches")

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._averaging.equalise_buffers(trains=False)  # once callbacks have swapped averages in
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

    # Reductions and barriers. The processes of a pipeline are one; replicas differ.

    @override
    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        return self._replicas.reduce(tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._replicas.all_gather(tensor, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._processes.decide(decision, all=all)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._processes.meet(f"come to {name or 'a barrier'}")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._processes.broadcast(obj, src)

    # Checkpoints, which do not depend on the pipeline.

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = with_whole_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state(self._root)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(optimizer, super().optimizer_state(optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        checkpoint = self._measured_balances.save(checkpoint)
        checkpoint = self._random_states.save(checkpoint, self._root)
        self._checkpoints.save(checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        return self._checkpoints.load(checkpoint_path, lambda path: load(path, *args, **kwargs))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._root
        self._measured_balances.load(checkpoint)
        is_set_up = self._piped is not None  # a callback restores what it has tried
        if not is_set_up:
            self._random_states.load(checkpoint, module.trainer)
        self._checkpoints.load_model(module, checkpoint, strict=strict, is_set_up=is_set_up)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(self.optimizers, checkpoint)
        self._sharding.drop_states(self.optimizers)

    # Teardown.

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._processes.split or self.options.divides_parameters:
            explain_meta(exception, self._root)
            explain_shards(exception, self._root)
        self._profiling.abort()
        self._train_alone()  # what was adapted refers to the process groups
        self._processes.leave()

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, SIGTERMException | _TunerExitException):
            return
        try:
            self._processes.tell(error)
        except RuntimeError as failure:  # of which the error comes
            error = failure
            raise
        finally:
            if self._piped is not None:
                self._piped.pipeline.tell(error)

    @override
    def teardown(self) -> None:
        self._signals.release()
        if self._piped is not None:
            self._piped.remove()
        self._train_alone()
        self._changes.abandon()  # the user's own replacements stay
        self._averages.release()
        self._profiling.release()
        self._checkpoints.release()
        self._random_states.release()
        self._piped = self._steps = None
        module = self._lightning_module
        if module is not None and module._trainer is not None:
            unshare(module._trainer)
        shards = self.options.tensor_parallel > 1
        if module is not None and (shards or must_stay(module)):
            self._lightning_module = None
            if self._processes.split or self.options.divides_parameters:
                to_cpu(module)
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _train_alone(self) -> None:
        """Leave the other processes: references to their groups could not be copied."""
        self._replicas.end()
        self._stage_shards.end()
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None

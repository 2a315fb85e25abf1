"""GPipe, the module that replaces the user's model, with its layers and its state dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_gpipe.core.balance import stage_costs
from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.faithful import not_compiled
from lightning_gpipe.core.frontends import StandIn, move_home, remove_dispatch_hooks, with_index
from lightning_gpipe.core.layout import Around, Layout, Weights, check_around, check_devices
from lightning_gpipe.core.pipeline.build import build, rebuild, recut
from lightning_gpipe.core.pipeline.choose.balancing import Balance, balance_of_each
from lightning_gpipe.core.pipeline.choose.options import Requested
from lightning_gpipe.core.pipeline.choose.planning import resolve
from lightning_gpipe.core.pipeline.choose.sampling import entries_with
from lightning_gpipe.core.pipeline.micro_batch_steps import (
    MicroBatchStepping,
    Outcome,
    StepSchedule,
)
from lightning_gpipe.core.pipeline.piped_module import PipedModule, check_entries, piped_modules_at
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.programs import RouteName
from lightning_gpipe.core.run import Engine, RunTimes, Stage, Threads, Timeline, check_threads
from lightning_gpipe.core.schedules import ActivationCheckpointing, OffloadActivations
from lightning_gpipe.core.show import Table, skip_table, stage_table
from lightning_gpipe.core.transport import check_cores


class GPipe(StandIn):
    """Runs a model as a pipeline over several devices; used like the model.

    Example::

        layers = nn.Sequential(a, b, c, d)
        model = GPipe(layers, balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = F.mse_loss(model(x), y.to(model.devices[-1]))
        loss.backward()

        model = GPipe(llama, [8, 8], module="model.layers", chunks=8)
        loss = model(input_ids=ids, labels=ids).loss

    The model itself runs as a pipeline, or a module in it. An nn.Sequential runs its layers one
    after another; the layers of an nn.ModuleList that the model's forward loops over, and of any
    other module, whose forward is traced, run as that forward calls them. The rest of the model is
    around the pipeline, on the last device by default, and runs as it is.

    The layers stay the same objects under the same names, so the state dict is that of the model,
    and its hooks are called with the pipeline as the module. The layers are moved to their devices
    at once, and must stay there. A parameter that layers on several devices share is on the first
    of them, and copied to the others; one that is used around the pipeline too is on the last. The
    input is split into micro-batches along dim 0, and their outputs are merged on the last device:
    see :class:`~lightning_gpipe.Rows`.

    Args:
        model: The model.
        balance: The number of layers in each stage: of an nn.Sequential its layers, those of nested
            ones one by one, or its children; of an nn.ModuleList its children; of any other module
            the calls of layers in its forward. Or the names of modules where stages begin, such as
            ``["down3", "up2"]``. Or a criterion, with one stage per device: ``"parameters"`` makes
            the largest stage as small as possible, with the rest of the model; ``"time"`` the
            slowest stage as fast as possible; ``"memory"`` the largest stage as small as possible
            in bytes, with activations and optimizer state. The last two measure each layer on the
            ``sample``, on the first device.
        module: The path of the module to pipeline, such as ``"model.layers"``. None takes the model
            itself, unless the balance counts or names the layers of the nn.Sequential or
            nn.ModuleList with more than half of its parameters. Several paths, such as
            ``["encoder.block", "decoder.block"]``, are a pipeline each, over the same devices and
            threads, with a balance for each, or together a chain.
        devices: One device per worker, as strings or ``torch.device``. There may be fewer than
            stages: stage j is on device j mod d. None takes as many GPUs as divide the number of
            stages, or without a GPU one CPU thread for each stage.
        around: The stage whose device has the rest of the model, such as embeddings, norms and
            heads, and gets the outputs: ``"last"``, where a loss is computed without a copy, or
            ``"first"``. All of it is on one device.
        chained: Whether several modules are one pipeline, with the stages of one after those of
            another, in the order in which the model calls them. A schedule with a loss for each
            micro-batch needs that.
        folded: Whether the stages go down the devices and back, two on each: stage j of 2d is on
            device j, from the d-th on on device 2d - 1 - j. For schedules in the form of a V.
        weights: The place of the stages' weights between their uses, with their gradients and the
            optimizer's state: the ``"device"`` of the stage, or the memory of the ``"host"``, for
            models larger than the devices. A device then has the weights of the stage at work and
            of its next one; buffers and the rest of the model stay on devices. ``"auto"`` plans it,
            as ``chunks``.
        offload_activations: Whether tensors that are kept for a backward wait for it in the memory
            of the host: the inputs of a micro-batch that is recomputed, of others those that
            autograd saves. A list such as ``[3, 1, 0]`` says how many micro-batches of those that
            each stage holds at its peak wait there. ``"auto"`` plans it, as ``chunks``.
        chunks: The number of micro-batches; a batch with fewer rows makes fewer. ``"auto"`` plans
            it: the layers are measured on the ``sample``, and the fastest prediction that fits the
            devices is taken.
        activation_checkpointing: The micro-batches that drop their activations in forward and run
            it again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, an integer k the first k, a list such a number for each stage. ``"auto"`` plans
            it, as ``chunks``.
        deferred_batch_norm: Whether batch norms update their running statistics once per mini-batch
            instead of once per micro-batch.
        microbatching: Another way to make micro-batches, such as ``Rows(dim=1)`` or
            :class:`~lightning_gpipe.PaddedSequences`. None splits along dim 0, with two rows or
            more in each micro-batch if there are batch norms.
        threads: Whether workers run on threads of their own. False runs everything on the calling
            thread in the schedule's order, for a debugger, as is always done on one device.
            ``"auto"`` measures both in the first mini-batches and keeps the faster one. The results
            are the same.
        cores: The number of cores that stages on the CPU share. An action uses ``cores`` divided by
            the number of workers that are at work then, by the schedule. None: each worker always
            has an equal share of PyTorch's intra-op threads.
        split_backward: Whether the gradients of the weights are computed apart, after those for
            which the stage before waits. ``"auto"`` plans it, as ``chunks``.
        sample: A mini-batch to measure the layers on, for ``balance="time"``, ``"memory"``, and
            ``"auto"``: a tuple of arguments, a dict of named ones, or one argument. An
            nn.Sequential has one argument, which may be a tuple.
        optimizer: The optimizer whose state ``balance="memory"`` counts: an optimizer, its class,
            or a function of a list of parameters that returns one. None counts none.
        owners: For each worker, the rank of the process that runs it: ``[0, 1]`` is a process per
            stage of two, ``[0, 0, 1, 1]`` two processes with two devices each. All processes make
            the same model and call it with the same input; each keeps the parameters of its own
            stages, and has the others on the ``meta`` device, in its state dict too; the state dict
            of a whole model can be loaded in each. None: this process runs all.
        group: The process group of these ranks; None for all processes. If it has NCCL for CUDA,
            tensors go straight from GPU to GPU.
        lost_after: The time after which a process that was stopped, or that no network reaches any
            more, is lost, which ends the others with an error that names it; one that is merely
            slow is not. To start, processes have ten times as long. None is 30 seconds; only with
            ``owners``.

    Attributes:
        balance: The number of layers in each stage.
        devices: One ``torch.device`` per worker.
        piped_modules: The piped modules.
        plan: The plan, if something was ``"auto"``.
        profiles: The costs of the layers, for each module, if they were measured.

    Raises:
        TypeError: If the model cannot run as a pipeline, or an argument has the wrong type.
        ValueError: If the balance does not fit the model, or the devices do not fit the balance.
    """

    def __init__(
        self,
        model: nn.Module,
        /,
        balance: Balance | Sequence[Balance],
        *,
        module: str | PipedModule | Sequence[str | PipedModule] | None = None,
        devices: Sequence[str | torch.device] | None = None,
        chunks: int | Literal["auto"] = 1,
        activation_checkpointing: ActivationCheckpointing | Literal["auto"] = "except_last",
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        threads: Threads = "auto",
        cores: int | None = None,
        split_backward: bool | Literal["auto"] = False,
        around: Around = "last",
        chained: bool = False,
        folded: bool = False,
        weights: Weights | Literal["auto"] = "device",
        offload_activations: OffloadActivations | Literal["auto"] = False,
        sample: Any = None,
        optimizer: Optimizers = None,
        owners: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        lost_after: timedelta | None = None,
    ) -> None:
        mode = activation_checkpointing
        requested = Requested(
            chunks, mode, "fill_drain", split_backward, weights, offload_activations
        )
        requested.check()
        check_around(around)
        check_devices(devices)
        check_microbatching(microbatching)
        check_threads(threads)
        check_cores(cores)
        balances = balance_of_each(module, balance)
        if isinstance(model, nn.Module):
            remove_dispatch_hooks(model)
        modules = piped_modules_at(model, module, balances)
        check_entries(modules, microbatching)
        resolved = resolve(
            modules,
            balances,
            requested,
            partial(entries_with, modules, sample),
            devices or (),
            around=around,
            microbatching=microbatching,
            optimizer=optimizer,
        )
        build(
            modules,
            resolved,
            devices,
            around,
            owners,
            group,
            lost_after,
            chained=chained,
            folds=folded,
            microbatching=microbatching,
            deferred_batch_norm=deferred_batch_norm,
            threads=threads,
            cores=cores,
        )
        super().__init__(model)
        self.piped_modules: Sequence[PipedModule] = modules
        self.plan = resolved.plan
        self.profiles = list(resolved.profiles)
        sizes = resolved.balances
        self.balance: list[Any] = sizes if len(sizes) > 1 else sizes[0]
        self.devices = list(self.layout.devices)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        rebuild(self.piped_modules, self.balances)  # programs call the modules of the first model

    @property
    def _pipelines(self) -> list[Pipeline]:
        return list(dict.fromkeys(piped.pipeline for piped in self.piped_modules))

    # The model is called.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; its piped modules run in micro-batches.

        An nn.Sequential takes one argument, any pytree with tensors of shape ``(rows, ...)``. Under
        ``torch.jit.trace``, ``torch.export`` and ``torch.fx``, which record the model, everything
        runs as without a pipeline.

        Raises:
            TypeError: If the inputs or outputs of a stage have tensors within other objects than
                pytrees and dataclasses.
            ValueError: If tensors disagree on their number of rows, or layers mix the rows, as
                attention does with ``batch_first=False``.
            RuntimeError: If a parameter was moved from its stage's device, or a layer replaced.
            BaseException: Any error that a layer raises, with a note of where it happened.
        """
        if type(args) is not tuple:  # torch.fx gives all positional arguments as one value
            return self.piped_modules[0].record(args)
        return self._call(*args, **kwargs)

    @not_compiled
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.telling():  # others wait for what its own code comes to next
            return self.piped_modules[0].run(*args, **kwargs)

    def by_micro_batch(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        schedule: StepSchedule = "1f1b",
        around: nn.Module | None = None,
        scale: float | Tensor = 1.0,
    ) -> Outcome:
        """Run a training step on each micro-batch, with a loss for each.

        ``step`` is suspended where it calls the model, so that backwards begin before all forwards
        have run: fewer micro-batches are alive at a time. The loss of the mini-batch is their mean,
        weighted by rows. If it is a mean over something else, such as tokens, the step returns
        ``{"loss": loss, "loss_weight": number}``::

            def step(batch):
                return F.cross_entropy(model(batch["x"]), batch["y"])

            outcome = model.by_micro_batch(step, batch, schedule="1f1b")
            outcome.loss.backward()

        Args:
            step: Gets a micro-batch; calls the model once, or each of its chained modules once and
                in order, and returns the loss, a dict with it, or None to skip the mini-batch.
            batch: The mini-batch: any pytree, cut like the model's input.
            schedule: ``"1f1b"``, with at most n - j micro-batches alive on stage j of n,
                interleaved if devices have several stages; ``"zero_bubble"``, with at most n of
                them, split backwards, and a device for each stage; or, on stages that are
                ``folded``, ``"zero_bubble_v"``, or with less memory ``"v_half"`` and ``"v_min"``.
                Or a block, which any of them may be: for each stage the starts of forward and
                backward of the first micro-batch in clock cycles, and of the gradients of the
                weights where backwards are split. ``[[0, 3], [1, 2]]`` is 1F1B on two devices.
            around: A module with all modules that the step uses around the model; None if it uses
                none.
            scale: The factor of gradients while they are computed, as of a gradient scaler.

        Returns:
            The loss, whose backward hands over the gradients, and the values that the step
            returned.

        Raises:
            ModuleNotFoundError: If greenlet is not installed.
            ValueError: If the schedule does not fit the layout or the number of micro-batches.
            RuntimeError: If the step does not call the model once, or in another state of the
                thread than its own, such as under autocast.
            BaseException: Any error of the step, or of a layer, with a note of where it happened.
        """
        stepping = MicroBatchStepping(self.only, schedule)
        models = [self._original] if around is None else [self._original, around]
        modules = (module for model in models for module in model.modules())
        return stepping.run(step, batch, modules=modules, scale=scale)

    # Settings that may change between two mini-batches.

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return self.piped_modules[0].pipeline.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        for pipeline in self._pipelines:
            pipeline.chunks = chunks

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """The micro-batches that are recomputed, as the argument of this name says."""
        return self.piped_modules[0].pipeline.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        for pipeline in self._pipelines:
            pipeline.activation_checkpointing = mode

    def rebalance(self, balance: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Cut the layers by another balance, and move those whose device changes.

        Call it between a backward and the next forward. Parameters stay the same objects, with
        their gradients; the optimizer's state stays where it is. On the CPU, results are the same
        to the bit, with two exceptions: random numbers of layers depend on their stages, and the
        gradients of a parameter or tensor that layers of several stages use are added stage by
        stage.

        Args:
            balance: The number of layers in each stage, of as many stages as before; of several
                modules, a list for each.

        Raises:
            TypeError, ValueError: If the balance does not fit the model; nothing has changed then.
            RuntimeError: If the pipeline runs over several processes, a mini-batch waits for its
                backward, or a device has no room; the layers are where they were then.
        """
        balances: list[Any] = [balance] if len(self.piped_modules) == 1 else list(balance)
        if len(balances) == len(self.piped_modules):
            pairs = zip(self.piped_modules, balances, strict=True)
            balances = [piped.frontend.in_units(each) for piped, each in pairs]
        recut(self.piped_modules, balances, self.balances)
        self.balance = [list(each) for each in balances] if len(balances) > 1 else list(balances[0])

    def share(self, parameters: Iterable[nn.Parameter], device: str | torch.device) -> None:
        """Make ``device`` the home of ``parameters`` that modules outside of the pipeline share.

        They are copied to stages on other devices. Parameters that only stages share need no call:
        their home is the device of the first of these stages.
        """
        layout = self.layout.with_everywhere(parameters, with_index(torch.device(device)))
        move_home(layout)
        self.piped_modules[0].pipeline.follow(layout)

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state dict of the whole model, as an nn.Module does.

        A pipeline over processes loads the tensors of its own process, and cannot ``assign``.

        Raises:
            ValueError: If tensors of stages of other processes would be assigned here.
        """
        if not self.layout.spread:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            raise ValueError(
                "assign must be False for a pipeline over processes: got assign=True, which would "
                "put the values of stages of other processes here, and replace parameters that an "
                "optimizer may hold. Leave it out: what is in this process is copied."
            )
        with warnings.catch_warnings():  # of the parameters of other processes
            warnings.filterwarnings("ignore", r"(?s).*to a meta parameter .* is a no-op")
            return super().load_state_dict(state_dict, strict=strict)

    # The layout, the engine, and the timeline.

    @property
    def balances(self) -> list[list[int]]:
        """The balance of each module."""
        return [self.balance] if len(self.piped_modules) == 1 else self.balance

    @property
    def layout(self) -> Layout:
        """The layout; prints as one line per stage. Of several modules, for the first."""
        return self.piped_modules[0].pipeline.layout

    @property
    def layouts(self) -> list[Layout]:
        """The layout of each pipeline: of each module, or of a chain of them."""
        return [pipeline.layout for pipeline in self._pipelines]

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of this process, in order; those of several modules one after another."""
        return [stage for pipeline in self._pipelines for stage in pipeline.stages]

    @property
    def microbatching(self) -> MicroBatching:
        """The object that splits a mini-batch into micro-batches, and merges the outputs."""
        return self.piped_modules[0].pipeline.microbatching

    @property
    def engine(self) -> Engine:
        """The engine, which runs the micro-batches. Of several modules, for the first."""
        return self.piped_modules[0].pipeline.engine

    @property
    def ways(self) -> list[RunTimes | None]:
        """The time of a mini-batch with threads and without, for each module.

        None until ``threads="auto"`` has chosen for mini-batches such as the latest one.
        """
        return [piped.pipeline.engine.found_way for piped in self.piped_modules]

    @property
    def timeline(self) -> Timeline | None:
        """The actions of the latest mini-batch with their times, or None before the first."""
        return self.engine.timeline

    def observe(self, observer: Callable[[Timeline], None]) -> RemovableHandle:
        """Call ``observer`` with the timeline of each mini-batch once its forward has ended.

        The backward is added to it later. ``remove()`` of the returned handle ends the calls.
        """
        return self.engine.observe(observer)

    def listing(self) -> Table:
        """Return a table of the stages: their devices, layers, parameters and outgoing skips.

        If the layers were measured, it has the predicted time and peak memory of each stage, too.
        """
        around, measured = self.layout.around, []
        triples = zip(self.piped_modules, self.profiles, self.balances, strict=False)
        for piped, profile, balance in triples:  # none, unless measured
            measured += stage_costs(profile, balance, piped.activation_checkpointing, around)
        return stage_table(self.layouts, self._skip_bytes(), measured)

    def skip_layout(self) -> Table:
        """Return a table of the skip connections: their layers, and the stages they cross.

        Once a micro-batch has run, it has the bytes that are sent from stage to stage.
        """
        return skip_table(self.layout, self._skip_bytes())

    def _skip_bytes(self) -> dict[RouteName, int]:
        return {name: size for stage in self.stages for name, size in stage.skip_bytes.items()}

    def extra_repr(self) -> str:
        devices = [str(device) for device in self.devices]
        around = "" if self.layout.around == "last" else f", around={self.layout.around!r}"
        owners = f", owners={list(self.layout.owners)}" if self.layout.spread else ""
        return (
            f"balance={self.balance}, devices={devices}, chunks={self.chunks}, "
            f"activation_checkpointing={self.activation_checkpointing!r}, "
            f"microbatching={self.microbatching!r}{around}{owners}"
        )

    # A pipeline among others: of other modules, of other processes, and in a Trainer.

    @property
    def only(self) -> Pipeline:
        """The only pipeline; raises ValueError if there are several."""
        if len(self._pipelines) > 1:
            paths = [piped.path for piped in self.piped_modules]
            raise ValueError(
                "a schedule with a loss for each micro-batch must have one pipeline to run: got "
                f"{len(paths)}, {', '.join(paths)}. Write chained=True, so that the stages of one "
                "module come after those of another."
            )
        return self.piped_modules[0].pipeline

    def tell(self, error: BaseException) -> None:
        """Send an error of your own code to the other processes, which ends their step too.

        Errors of the model and errors that end the process are sent by themselves: call this with
        an error between two calls of the model that you catch.
        """
        self.engine.tell(error)

    def release(self) -> None:
        """Let the model itself run as without a pipeline; its layers stay on their devices."""
        for piped in self.piped_modules:
            piped.frontend.remove()

    def close(self) -> None:
        """End the worker threads; the next forward starts new ones."""
        for pipeline in self._pipelines:
            pipeline.close()

    # The layers, as of an nn.Sequential.

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        if isinstance(self._original, nn.Sequential):
            return iter(self._original)
        return iter(layer for layout in self.layouts for layer in layout.layers)

    def __getitem__(self, index: int | slice) -> nn.Module:
        layers = list(self)[index]
        return nn.Sequential(*layers) if isinstance(layers, list) else layers

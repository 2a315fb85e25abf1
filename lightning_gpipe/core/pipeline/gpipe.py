"""GPipe, the module that replaces the user's model.

It moves what its parts say to the devices, attaches a pipeline to it, and is called and asked like
the model. What outlives a forward belongs to the user (the model) or to the pipeline's engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.faithful import not_compiled
from lightning_gpipe.core.frontends import StandIn, undispatch
from lightning_gpipe.core.pipeline.balancing import (
    Balance,
    balance_of_each,
    measured_costs,
)
from lightning_gpipe.core.pipeline.given import Given
from lightning_gpipe.core.pipeline.parts import parts_of
from lightning_gpipe.core.pipeline.pipeline import Handles, Pipeline, check_settings
from lightning_gpipe.core.pipeline.placing import place_all
from lightning_gpipe.core.pipeline.stepping import Outcome, Stepping
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    Around,
    ByMicroBatch,
    Layout,
    RouteName,
)
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.run import Engine, Found, Stage, Threads, Timeline, check_threads
from lightning_gpipe.core.show import Table, skip_table, stage_table
from lightning_gpipe.core.skip import skips_of
from lightning_gpipe.core.transport import Twins


class GPipe(StandIn):
    """Runs a model as a pipeline over several devices; used like the model.

    Example::

        layers = nn.Sequential(a, b, c, d)
        model = GPipe(layers, balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = F.mse_loss(model(x), y.to(model.devices[-1]))
        loss.backward()

        model = GPipe(llama, [8, 8], module="model.layers", chunks=8)
        loss = model(input_ids=ids, labels=ids).loss

    What runs as a pipeline is the model itself, or a module in it. An nn.Sequential runs its layers
    one after another; of an nn.ModuleList that the model's forward loops over, and of any other
    module, whose forward is traced, the layers run as that forward calls them. Everything else in
    the model is around the pipeline, on the last device by default, and runs as it is.

    The layers stay the same objects under the same names, so the state dict is that of the model.
    Its hooks, and parameters and buffers of its own, are the pipeline's too: the hooks are called
    with the pipeline as the module, the tensors are moved to the last device. The layers are moved
    to their devices at once, and must stay there. A parameter that layers on several
    devices share is on the first of them, and the others follow it with copies; one that is used
    around the pipeline too is on the last. The input is split into micro-batches along dim 0, and
    their outputs are merged on the last device: see :class:`~lightning_gpipe.Rows`.

    Args:
        model: The model.
        balance: The number of layers in each stage: of an nn.Sequential or nn.ModuleList its
            children, of any other module the calls of layers in its forward. Or the names of
            modules where stages begin, such as ``["down3", "up2"]``. Or what to go by, with one
            stage per device: ``"parameters"``, so that the largest stage has as few parameters as
            possible, what is around the pipeline included; ``"time"``, so that the slowest stage is
            as fast as possible; ``"memory"``, so that the largest stage needs as few bytes as
            possible, activations and optimizer state included. The last two run each layer by
            itself on a ``sample``, on the first device.
        module: The path of what runs as a pipeline, such as ``"model.layers"``. None takes the
            model itself, unless the balance counts or names the layers of the nn.Sequential or
            nn.ModuleList with more than half of its parameters. Several paths, such as
            ``["encoder.block", "decoder.block"]``, are a pipeline each, over the same devices and
            threads, with a balance for each.
        devices: One device per worker, as strings or ``torch.device``. There may be fewer than
            stages: stage j is on device j mod d. None takes as many GPUs as divide the number of
            stages, or without a GPU one CPU thread for each stage.
        around: Which stage's device has what is around the pipeline, such as embeddings, norms and
            heads, and gets its outputs: ``"last"`` or ``"first"``. The last needs no copy of the
            outputs, and is where a loss is computed; the first may have the room. The
            values are ends of the pipeline and no devices, so that they hold for any ``devices``.
            None gives embeddings to the first stage and heads to the last, because the model's own
            code around the pipeline runs on one device.
        folded: Whether the stages go down the devices and back, two on each: stage j of 2d is on
            device j, from the d-th on on device 2d - 1 - j. For ``schedule="zero_bubble_v"``.
        chunks: The number of micro-batches; a batch with fewer rows makes fewer. ``"auto"`` plans
            it: the layers are measured on the ``sample``, and what is predicted to be fastest is
            taken of what fits the devices.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, an integer k the first k. ``"auto"`` plans it, as ``chunks``.
        deferred_batch_norm: Whether batch norms update their running statistics once per mini-batch
            instead of once per micro-batch.
        microbatching: Another way to make micro-batches, such as ``Rows(dim=1)`` or
            :class:`~lightning_gpipe.PaddedSequences`. None splits along dim 0, with two rows or
            more in each micro-batch if there are batch norms.
        threads: Whether workers run on threads of their own. False runs everything on the calling
            thread in the schedule's order, for a debugger, as is always done on one device.
            ``"auto"`` finds the faster way in the first mini-batches: with small operators one
            thread is. The results are the same.
        split_backward: Whether the gradients of the weights are computed apart from those for which
            the stage before waits, so that it waits for less. ``"auto"`` plans it, as ``chunks``.
        sample: A mini-batch to measure the layers on, for ``balance="time"``, ``"memory"``, and
            what is ``"auto"``: a tuple of arguments, a dict of named ones, or one argument. An
            nn.Sequential has one argument, which may be a tuple.
        optimizer: What ``balance="memory"`` counts as optimizer state: an optimizer, its class, or
            a function that makes one of a list of parameters. None counts none.
        owners: For each worker, the rank of the process that runs it: ``[0, 1]`` is a process per
            stage of two, ``[0, 0, 1, 1]`` two processes with two devices each. All processes make
            the same model and call it with the same input; each keeps the parameters of its own
            stages, and has those of the others on the ``meta`` device, in its state dict too; the
            state dict of a whole model can be loaded in each. None: this process runs all.
        group: The process group of these ranks; None for all processes.
        lost_after: After how long a process that was stopped, or that no network reaches any more,
            is lost, which ends the others with an error that names it. One that is merely slow is
            not: it may pause for as long as it likes. To start, processes have ten times as long.
            None is 30 seconds; only with ``owners``.

    Attributes:
        balance: The number of layers in each stage.
        devices: One ``torch.device`` per worker.
        chunks: As given.
        activation_checkpointing: As given.
        microbatching: How a mini-batch is split into micro-batches.
        plan: The plan, if something was ``"auto"``.
        profiles: What the layers cost, for each module, if the balance was found by measurement.

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
        module: str | Taken | Sequence[str | Taken] | None = None,
        devices: Sequence[str | torch.device] | None = None,
        chunks: int | Literal["auto"] = 1,
        activation_checkpointing: ActivationCheckpointing | Literal["auto"] = "except_last",
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        threads: Threads = "auto",
        split_backward: bool | Literal["auto"] = False,
        around: Around = "last",
        folded: bool = False,
        sample: Any = None,
        optimizer: Optimizers = None,
        owners: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        lost_after: timedelta | None = None,
    ) -> None:
        given = Given(chunks, activation_checkpointing, split_backward=split_backward)
        given.check()
        check_settings(1, "never", microbatching, around)
        check_threads(threads)
        balances = balance_of_each(module, balance)
        spread = undispatch(model) if isinstance(model, nn.Module) else None
        parts = parts_of(
            model,
            module,
            balances,
            given,
            devices=devices,
            around=around,
            folds=folded,
            microbatching=microbatching,
            sample=sample,
            optimizer=optimizer,
            owners=owners,
            group=group,
            lost_after=lost_after,
        )
        super().__init__(model)
        self.plan, self.profiles = parts.choice.plan, parts.profiles
        if deferred_batch_norm:
            parts.check_batch_norms()
        self.balance: list[Any] = parts.balances if len(parts.found) > 1 else parts.balances[0]
        self.devices = list(parts.layouts[0].devices)
        place_all(model, parts.layouts)
        if spread is not None and spread.moved:
            warnings.warn(str(spread), stacklevel=2)
        self._pipelines = parts.pipelines(
            microbatching=microbatching, deferred_batch_norm=deferred_batch_norm, threads=threads
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pipelines.copied(self.balances)

    @property
    def _pipeline(self) -> Pipeline:
        return self._pipelines[0]

    # The model is called.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; what was taken of it runs in micro-batches.

        An nn.Sequential takes one argument, any pytree with tensors of shape ``(rows, ...)``. Under
        ``torch.jit.trace``, ``torch.export`` and ``torch.fx``, which record the model, everything
        runs as without a pipeline.

        Raises:
            TypeError: If what enters or leaves a stage has tensors within other objects than
                pytrees and dataclasses.
            ValueError: If tensors disagree on their number of rows, or layers mix the rows, as
                attention does with ``batch_first=False``.
            RuntimeError: If a parameter was moved from its stage's device, or a layer replaced.
            BaseException: Any error that a layer raises, with a note of where it happened.
        """
        if type(args) is not tuple:  # torch.fx gives all positional arguments as one value
            return self.taken[0].record(args)
        return self._call(*args, **kwargs)

    @not_compiled
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._pipelines.found[0]
        with taken.pipeline.engine.telling():  # others wait for what its own code comes to next
            return taken.call(*args, **kwargs)

    def by_micro_batch(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        schedule: ByMicroBatch = "1f1b",
        around: nn.Module | None = None,
        scale: float | Tensor = 1.0,
    ) -> Outcome:
        """Run a training step on each micro-batch, with a loss for each.

        ``step`` is suspended where it calls the model, so that backwards begin while other
        micro-batches have not: fewer of them are alive at a time. Their mean, weighted by rows, is
        the loss of the mini-batch where that is a mean over rows. Where it is a mean over something
        else, such as tokens, the step returns ``{"loss": loss, "loss_weight": number}``::

            def step(batch):
                return F.cross_entropy(model(batch["x"]), batch["y"])

            outcome = model.by_micro_batch(step, batch, schedule="1f1b")
            outcome.loss.backward()

        Args:
            step: Given a micro-batch, calls the model once, and returns the loss, a dict with it,
                or None to skip the mini-batch.
            batch: The mini-batch: any pytree, cut like the model's input.
            schedule: What runs when: ``"1f1b"``, with at most n - j micro-batches alive on stage j
                of n, and interleaved where devices have several stages; ``"zero_bubble"``, with
                at most n of them, split backwards, and a device for each stage; or
                ``"zero_bubble_v"`` on stages that are ``folded``.
            around: A module with all that the step uses around the model; None if there is nothing.
            scale: What gradients are multiplied by while they are computed, as by a gradient
                scaler.

        Returns:
            The loss, whose backward hands over the gradients, and what the step returned.

        Raises:
            ModuleNotFoundError: If greenlet is not installed.
            ValueError: If the schedule does not fit the layout or the number of micro-batches.
            RuntimeError: If the step does not call the model once, or in another state of the
                thread than its own, such as under autocast.
            BaseException: Any error of the step, or of a layer, with a note of where it happened.
        """
        stepping = Stepping(self.only, schedule)
        models = [self._original] if around is None else [self._original, around]
        modules = (module for model in models for module in model.modules())
        return stepping.run(step, batch, around=modules, scale=scale)

    # What may change between two mini-batches.

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return self._pipeline.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._pipelines.set("chunks", chunks)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """Which micro-batches are recomputed."""
        return self._pipeline.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, chosen: ActivationCheckpointing) -> None:
        self._pipelines.set("activation_checkpointing", chosen)

    @property
    def step(self) -> int:
        """The number of the training's step, if it is known; processes must agree on it."""
        return self._pipeline.step

    @step.setter
    def step(self, step: int) -> None:
        self._pipelines.set("step", step)

    def rebalance(self, balance: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Cut the layers by another balance, and move those that come to another device.

        For between a backward and the next forward. Parameters stay the same objects, with their
        gradients; the state that an optimizer has of them stays where it is. What is computed is
        the same to the bit on the CPU, with two exceptions: layers that draw random numbers draw
        others, by their new stages, and where a parameter or a tensor is used by layers of several
        stages, its gradients are added stage by stage, in another order.

        Args:
            balance: The number of layers in each stage, of as many stages as there are; of several
                modules, a list for each.

        Raises:
            TypeError, ValueError: If the balance does not fit the model; nothing has changed then.
            RuntimeError: If the pipeline runs over several processes, a mini-batch waits for its
                backward, or a device has no room; the layers are where they were then.
        """
        balances: list[Any] = [balance] if len(self.taken) == 1 else list(balance)
        self._pipelines.recut(balances, self.balances)
        self.balance = [list(each) for each in balances] if len(balances) > 1 else list(balance)

    def share(self, parameters: Iterable[nn.Parameter], device: str | torch.device) -> None:
        """Make ``device`` the home of ``parameters`` that modules outside of the pipeline share.

        Stages on other devices follow them with copies. The home of parameters that only stages
        share is the device of the first of these stages; they need not be given here.
        """
        self._pipeline.share(parameters, device)

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state dict of the whole model; of it, what this process has.

        Args:
            state_dict: As for an nn.Module.
            strict: As for an nn.Module.
            assign: As for an nn.Module; False if there are other processes.

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
        with warnings.catch_warnings():  # of what other processes have
            warnings.filterwarnings("ignore", r"(?s).*to a meta parameter .* is a no-op")
            return super().load_state_dict(state_dict, strict=strict)

    # What runs where, and what ran when.

    @property
    def balances(self) -> list[list[int]]:
        """The balance of each module."""
        return [self.balance] if len(self.taken) == 1 else self.balance

    @property
    def layout(self) -> Layout:
        """What runs where; prints as one line per stage. Of several modules, for the first."""
        return self._pipeline.layout

    @property
    def layouts(self) -> list[Layout]:
        """What runs where, for each module."""
        return [pipeline.layout for pipeline in self._pipelines]

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of this process, in order; those of several modules one after another."""
        return [stage for pipeline in self._pipelines for stage in pipeline.stages]

    @property
    def microbatching(self) -> MicroBatching:
        """How a mini-batch is split into micro-batches."""
        return self._pipeline.microbatching

    @property
    def engine(self) -> Engine:
        """The engine, which runs the micro-batches. Of several modules, for the first."""
        return self._pipeline.engine

    @property
    def ways(self) -> list[Found | None]:
        """How long a mini-batch takes with threads and without, for each module.

        None until ``threads="auto"`` has chosen for mini-batches such as the latest one.
        """
        return [pipeline.engine.found_way for pipeline in self._pipelines]

    @property
    def timeline(self) -> Timeline | None:
        """What ran when in the latest mini-batch, or None before the first."""
        return self.engine.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.engine.timeline = timeline

    def observe(self, observer: Callable[[Timeline], None]) -> RemovableHandle | Handles:
        """Call ``observer`` with the timeline of each mini-batch once its forward has ended.

        The backward is added to the timeline later. A step that runs the pipeline twice calls
        ``observer`` twice.

        Returns:
            A handle whose ``remove()`` ends the calls.
        """
        return self._pipelines.observe(observer)

    def listing(self) -> Table:
        """A table of the stages: their devices, layers, parameters and skips that leave them.

        If the balance was found by measurement, it has what a mini-batch costs each stage, too: the
        time, and the memory at its peak.
        """
        mode, around = self.activation_checkpointing, self.layout.around
        measured = measured_costs(self.profiles, self.balances, mode, around)
        return stage_table(self.layouts, self._skip_bytes(), measured)

    def skip_layout(self) -> Table:
        """A table of the skip connections: between which layers, and which stages they cross.

        Once a micro-batch has run, it has the bytes of those that are sent from stage to stage.
        """
        return skip_table(skips_of(list(self)), self.layout.partitions, self._skip_bytes())

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
    def taken(self) -> Sequence[Taken]:
        """What runs as a pipeline, of the model."""
        return self._pipelines.found

    @property
    def only(self) -> Pipeline:
        """The pipeline.

        Raises:
            ValueError: If there are several.
        """
        if len(self._pipelines) > 1:
            raise ValueError(
                "a schedule with a loss for each micro-batch must have one module to run: got "
                f"{len(self._pipelines)}. Name one, or leave out schedule: fill-drain runs all."
            )
        return self._pipeline

    def copy_batches(self, root: torch.device) -> Twins | None:
        """Let the first stage take tensors of batches from where they were before ``root``.

        Returns:
            What copies them there when batches are moved; None if there is nothing to gain.
        """
        return self._pipelines.copy_batches(root)

    def tell(self, error: BaseException) -> None:
        """Tell the other processes of an error in your own code, which ends their step too.

        What the model raises is told to all by itself, and so is what ends the process: this is for
        an error between two calls of the model, which you catch, and go on.
        """
        self.engine.tell(error)

    def release(self) -> None:
        """Let the model itself run as without a pipeline; its layers stay on their devices."""
        self._pipelines.release()

    def close(self) -> None:
        """End the worker threads; the next forward starts new ones."""
        self._pipelines.close()

    # The layers, as of an nn.Sequential.

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        partitions = (part for each in self._pipelines for part in each.layout.partitions)
        return iter(layer for partition in partitions for layer in partition.layers)

    def __getitem__(self, index: int | slice) -> nn.Module:
        chosen = list(self)[index]
        return nn.Sequential(*chosen) if isinstance(chosen, list) else chosen

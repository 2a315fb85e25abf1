"""Runs mini-batches: cuts them into the engine's micro-batches, and merges their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.data import (
    Division,
    FlatTree,
    MicroBatching,
    Receiver,
    Term,
    joined,
    map_tensors,
    reduced,
    term_receiver,
    trained_sums,
    tree_flatten,
    tree_unflatten,
    warn_of_equal_sums,
)
from lightning_gpipe.core.faithful import refuse_unsupported_modes
from lightning_gpipe.core.layout import META, Layout, check_order
from lightning_gpipe.core.pipeline.choose.options import Resolved
from lightning_gpipe.core.pipeline.outputs import once_or_per_row
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import (
    DividedWeights,
    Engine,
    Stage,
    Threads,
    ThreadsOrInline,
    UserStep,
    watch_outputs,
)
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    Schedule,
    check_activation_checkpointing,
    check_offload_activations,
    fill_drain,
    recomputed_by_stage,
)
from lightning_gpipe.core.transport import (
    Connection,
    InlineTransport,
    LocalTransport,
    ProcessGroupTransport,
    Transport,
    Workers,
)


class Pipeline:
    """Stages that run mini-batches; see :class:`~lightning_gpipe.GPipe` for the settings.

    Args:
        layout: The layout; the layers are on their devices already.
        workers: The threads, which pipelines of other modules over the same devices use too.
        connection: The connection to the owners of the layout; None if there is one.
        number: The index among the pipelines of the connection.
    """

    def __init__(
        self,
        layout: Layout,
        settings: Resolved,
        *,
        microbatching: MicroBatching,
        deferred_batch_norm: bool,
        threads: Threads,
        cores: int | None,
        workers: Workers,
        connection: Connection | None = None,
        number: int = 0,
    ) -> None:
        self.chunks = settings.chunks
        self.reads_losses = True  # unless a verification compares them
        self.split_backward = settings.split_backward
        self.microbatching = microbatching
        self._deferred_batch_norm = deferred_batch_norm
        self._offload_activations = settings.offload_activations
        check_offload_activations(self._offload_activations, layout.n)
        self._threads = threads
        self._cores = cores
        self.layout = layout
        self.engine = self._engine(layout, workers, connection, number)
        self.activation_checkpointing = settings.activation_checkpointing
        self._looks = 2  # at loss terms, the second for what is zero in the first

    def _engine(
        self, layout: Layout, workers: Workers, connection: Connection | None, number: int
    ) -> Engine:
        # Pipelines over the same processes take turns, as those over the same threads do.
        turns = workers.exclusion if layout.spread else None
        runner: LocalTransport | InlineTransport
        runner = InlineTransport(layout, turns, cores=self._cores)
        if self._threads and len(layout.workers_here) > 1:
            check_order(layout.layers)
            runner = LocalTransport(layout, workers, cores=self._cores)
        transport: Transport = runner
        if connection is not None:
            transport = ProcessGroupTransport(layout, runner, connection, number)
            transport.start()
        choose = self._threads == "auto" and isinstance(transport, LocalTransport)
        return Engine(
            layout,
            transport,
            deferred_batch_norm=self._deferred_batch_norm,
            offload_activations=self._offload_activations,
            ways=ThreadsOrInline(layout.devices_here) if choose else None,
        )

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        check_activation_checkpointing(mode, self.engine.layout.n)
        self._activation_checkpointing = mode

    def recomputed(self, m: int) -> tuple[int, ...]:
        return recomputed_by_stage(self._activation_checkpointing, m, self.engine.layout.n)

    def rebuild(self, layout: Layout, workers: Workers) -> None:
        """Run on another layout from now on, in this process, with the same observers."""
        before = vars(self).get("engine")  # none in a copy
        self.layout = layout
        self.engine = self._engine(layout, workers, None, 0)
        if before is not None:
            self.engine.succeed(before)

    def follow(self, layout: Layout) -> None:
        """Use a layout with other homes of parameters from the next mini-batch on."""
        self.layout = self.engine.layout = layout

    def divide(self, elsewhere: Iterable[nn.Parameter], weights: DividedWeights) -> None:
        """Gather weights of stages from replicas; those ``elsewhere`` have no values here."""
        self.layout = self.layout.with_homes(dict.fromkeys(elsewhere, META))
        self.engine.divide(self.layout, weights)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is cut anew, and gets an engine of its own.
        if self.layout.spread:
            raise TypeError(
                "a pipeline over processes cannot be copied or pickled. Copy the model before it "
                "becomes a pipeline, or the model that the pipeline was made of."
            )
        return {name: x for name, x in vars(self).items() if name != "engine"}

    @property
    def stages(self) -> Sequence[Stage]:
        return self.engine.stages

    def run_program(
        self,
        program: Program,
        values: Sequence[Any],
        *,
        chunks: int | None = None,
        stacked: bool = False,
    ) -> list[Any]:
        """Run a program, see :class:`~lightning_gpipe.core.frontends.RunProgram`.

        Outputs without rows are stacked over the micro-batches if ``stacked``; otherwise they are
        returned once, and raise a ValueError if they differ between micro-batches.
        """
        batch = as_batch(values)
        code = self.engine.code
        if code is not None and code.is_current():
            outputs = [self._called(code, program, batch)]
            return self._returned(_columns(program, outputs), batch, outputs)
        with self.engine.telling():
            outputs, division = self._run(program, batch, chunks or self.chunks)
            columns = _columns(program, outputs)
            if len(outputs) > 1 and not stacked:
                sizes = division()
                columns = [
                    once_or_per_row(column, partial(program.title_of, number), sizes)
                    for number, column in zip(program.outputs, columns, strict=True)
                ]
            return self._returned(columns, batch, outputs)

    def close(self) -> None:
        self.engine.close()

    def _run(
        self, program: Program, batch: Any, chunks: int
    ) -> tuple[list[FlatTree], Callable[[], Division | None]]:
        refuse_unsupported_modes()
        pieces = self.microbatching.split(batch, 1 if self._evaluates_whole else chunks)
        microbatches = list(map(_flatten(program), pieces))
        m = len(microbatches)
        if m == 0:
            raise ValueError(
                f"{type(self.microbatching).__name__}.split must make at least one micro-batch: "
                "got none."
            )
        division = partial(self.microbatching.division, pieces)
        receiver = term_receiver.get()
        flat, terms = self.engine.run(
            microbatches, self._schedule(m), program, division, terms=receiver is not None
        )
        if terms and self._looks:
            self._looks -= 1
            warn_of_equal_sums(list(map(trained_sums, terms)))
        self._hand_out(reduced(terms, division), receiver)
        return flat, division

    @property
    def _evaluates_whole(self) -> bool:
        """True in evaluation, if the results of layers depend on all rows of the mini-batch."""
        if any(layer.training for each in self.layout.partitions for layer in each.layers):
            return False
        return any(norm.running_mean is None for norm in self._batch_norms)

    @cached_property
    def _batch_norms(self) -> list[_BatchNorm]:
        modules = (module for each in self.layout.partitions for module in each.modules)
        return [module for module in modules if isinstance(module, _BatchNorm)]

    def _hand_out(self, terms: Iterable[Term], receiver: Receiver | None) -> None:
        if receiver is None:
            return
        for term in terms:
            receiver(term._replace(value=self._sent_back(term.value)))

    def _called(self, code: UserStep, program: Program, batch: Any) -> FlatTree:
        refuse_unsupported_modes()
        [piece] = self.microbatching.split(batch, 1)
        receiver = term_receiver.get()
        inputs, at_last = _flatten(program)(piece), self.engine.at_last
        told = at_last is not None and at_last.told
        output, terms = code.call(inputs, program, terms=receiver is not None, told=told)
        self._hand_out(terms, receiver)
        return output

    def _returned(
        self, columns: Iterable[Sequence[Any]], batch: Any, outputs: Sequence[FlatTree]
    ) -> list[Any]:
        merge = self.microbatching.merge
        values = [self._sent_back(merge(column, batch)) for column in columns]
        watch_outputs(values, outputs[0])
        return values

    def _sent_back(self, output: Any) -> Any:
        layout = self.engine.layout
        last, outside = layout.device_of(layout.n - 1), layout.outside
        if last == outside:
            return output
        return map_tensors(lambda x: x.to(outside) if x.device == last else x, output)

    def _schedule(self, m: int) -> Schedule:
        placement = self.engine.layout.placement
        if not torch.is_grad_enabled():
            return fill_drain(m, placement)
        recomputed = recomputed_by_stage(self._activation_checkpointing, m, len(placement))
        schedule = fill_drain(m, placement, recomputed=recomputed, split=self.split_backward)
        return schedule.with_gradients if self.engine.sends_gradients else schedule


def as_batch(values: Sequence[Any]) -> Any:
    """Return the batch to split: the value of the program's only input, or a list of values."""
    return values[0] if len(values) == 1 else list(values)


def _flatten(program: Program) -> Callable[[Any], FlatTree]:
    return tree_flatten if len(program.inputs) == 1 else joined


def _columns(program: Program, outputs: Iterable[FlatTree]) -> list[Sequence[Any]]:
    values = list(map(tree_unflatten, outputs))
    return [values] if len(program.outputs) == 1 else list(zip(*values, strict=True))

"""Mini-batches in, mini-batches out: between the caller's values and the engine's micro-batches.

The engine runs micro-batches by a schedule. What a mini-batch becomes is decided here: into how
many micro-batches it is cut, which of them are recomputed, how their outputs are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.data import (
    Division,
    FlatTree,
    MicroBatching,
    check_chunks,
    check_microbatching,
    joined,
    map_tensors,
    parted,
    reduced,
    term_receiver,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.faithful import (
    Journal,
    refuse_cached_parametrizations,
    refuse_function_transforms,
)
from lightning_gpipe.core.frontends import with_index
from lightning_gpipe.core.pipeline.outputs import once_or_per_row
from lightning_gpipe.core.pipeline.placing import move_home
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    Layout,
    Program,
    Schedule,
    check_activation_checkpointing,
    check_around,
    count_recomputed,
    fill_drain,
)
from lightning_gpipe.core.run import Code, Engine, Stage, Threads, Ways
from lightning_gpipe.core.transport import (
    Connection,
    InlineTransport,
    LocalTransport,
    ProcessGroupTransport,
    Transport,
    Workers,
)


class Pipeline:
    """Stages that run mini-batches.

    Args:
        layout: What runs where; the layers are on their devices already.
        chunks: The number of micro-batches; a batch with fewer rows makes fewer.
        activation_checkpointing: Which micro-batches are recomputed.
        microbatching: How a mini-batch is split into micro-batches.
        deferred_batch_norm: Whether batch norms update their statistics once per mini-batch.
        threads: Whether workers run on threads of their own; ``"auto"`` finds the faster way.
        split_backward: Whether backward computes the gradients of the weights apart.
        workers: The threads, if pipelines of other modules over the same devices use them too.
        connection: To the owners of the layout, if there are several.
        number: Which of the pipelines that were connected together it is.

    Attributes:
        chunks, activation_checkpointing, split_backward, microbatching: As given.
        engine: What runs the micro-batches.
        patches: The changes that a running verification has made in the layers.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        chunks: int,
        activation_checkpointing: ActivationCheckpointing,
        microbatching: MicroBatching,
        deferred_batch_norm: bool,
        threads: Threads,
        split_backward: bool = False,
        workers: Workers | None = None,
        connection: Connection | None = None,
        number: int = 0,
    ) -> None:
        self.chunks = chunks
        self.activation_checkpointing = activation_checkpointing
        self.split_backward = split_backward
        self.microbatching = microbatching
        self._fixed: dict[str, Any] = {
            "deferred_batch_norm": deferred_batch_norm,
            "threads": threads,
            "split_backward": split_backward,
        }
        transport = _connect(layout, workers, connection, number, threads=bool(threads))
        choose = threads == "auto" and isinstance(transport, LocalTransport)
        self.engine = Engine(
            layout,
            transport,
            deferred_batch_norm=deferred_batch_norm,
            ways=Ways(layout.devices_here) if choose else None,
        )
        self.patches = Journal()

    @property
    def layout(self) -> Layout:
        """What runs where."""
        return self.engine.layout

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""
        return self.engine.stages

    @property
    def outside(self) -> torch.device:
        """The device of what is around the stages in this process."""
        return self.layout.outside

    def owns(self, j: int) -> bool:
        """Whether stage ``j`` is in this process."""
        return self.layout.owner_of(j) == self.layout.rank

    def tell(self, error: BaseException) -> None:
        """See :class:`~lightning_gpipe.core.frontends.Processes`."""
        self.engine.tell(error)

    def everywhere(self, j: int, compute: Callable[[], Any]) -> Any:
        """See :class:`~lightning_gpipe.core.frontends.Processes`."""
        return self.engine.everywhere(j, compute)

    def again(self, layout: Layout, workers: Workers | None) -> Pipeline:
        """A new pipeline with the same settings and observers, for another layout."""
        made = Pipeline(
            layout,
            chunks=self.chunks,
            activation_checkpointing=self.activation_checkpointing,
            microbatching=self.microbatching,
            workers=workers,
            **self._fixed,
        )
        made.engine.succeed(self.engine)
        return made

    def run(self, input: Any) -> Any:
        """Run the layers one after another on ``input`` in micro-batches, and merge the output."""
        code = self.engine.code
        if code is not None and code.current:
            return self._called(code, tree_flatten, input)
        with self.engine.telling():
            outputs, _ = self._run(input, self.chunks, tree_flatten)
            return self._merged(list(map(tree_unflatten, outputs)), input)

    def run_program(
        self, program: Program, values: Sequence[Any], *, chunks: int | None = None
    ) -> list[Any]:
        """Run a program, see :class:`~lightning_gpipe.core.frontends.RunProgram`.

        Raises:
            ValueError: If an output has no row per sample, and differs between micro-batches.
        """
        with self.engine.telling():
            return self._run_program(program, values, chunks or self.chunks)

    def _run_program(self, program: Program, values: Sequence[Any], chunks: int) -> list[Any]:
        # One value is split like the input of layers, and each output is merged like theirs.
        one = len(values) == 1
        batch, flatten = (values[0], _alone) if one else (list(values), joined)
        code = self.engine.code
        if code is not None and code.current:
            found = self._called(code, flatten, batch, program)
            return [self._merged([each], batch) for each in found]
        outputs, division = self._run(batch, chunks, flatten, program)
        found = zip(*(map(tree_unflatten, parted(each)) for each in outputs), strict=True)
        if len(outputs) == 1:
            return [self._merged(each, batch) for each in found]
        known = division()
        return [
            self._merged(once_or_per_row(each, partial(program.title_of, number), known), batch)
            for number, each in zip(program.outputs, found, strict=True)
        ]

    def share(self, parameters: Iterable[nn.Parameter], device: str | torch.device) -> None:
        """Make ``device`` the home of ``parameters`` that modules outside of the pipeline share."""
        layout = self.layout.with_everywhere(parameters, with_index(torch.device(device)))
        move_home(layout)
        self.engine.layout = layout

    @property
    def step(self) -> int:
        """The number of the training's step; processes must agree on it."""
        return self.engine.step

    @step.setter
    def step(self, step: int) -> None:
        self.engine.step = step

    def close(self) -> None:
        """End the worker threads; the next mini-batch starts new ones."""
        self.engine.close()

    def reset_patches(self) -> None:
        """Undo what an interrupted verification left in the layers."""
        if len(self.patches):
            with self.engine.exclusive():
                self.patches.reset()

    def _run(
        self,
        batch: Any,
        chunks: int,
        flatten: Callable[[Any], FlatTree],
        program: Program | None = None,
    ) -> tuple[list[FlatTree], Callable[[], Division | None]]:
        """Run a mini-batch; returns the output of each micro-batch, and what knows their rows."""
        refuse_function_transforms()
        refuse_cached_parametrizations()
        pieces = self.microbatching.split(batch, chunks)
        microbatches = list(map(flatten, pieces))
        m = len(microbatches)
        if m == 0:
            raise ValueError(
                f"{type(self.microbatching).__name__}.split must make at least one micro-batch: "
                "got none."
            )
        division = partial(self.microbatching.division, pieces)
        receiver = term_receiver()
        flat, terms = self.engine.run(
            microbatches,
            self._schedule(m),
            division,
            terms=receiver is not None,
            program=program,
        )
        if receiver is not None:
            for term in reduced(terms, division):
                receiver(term._replace(value=self._sent_back(term.value)))
        return flat, division

    def _called(
        self,
        code: Code,
        flatten: Callable[[Any], FlatTree],
        input: Any,
        program: Program | None = None,
    ) -> Any:
        """Call the stages from code that runs for each micro-batch, with all of its input."""
        refuse_function_transforms()
        refuse_cached_parametrizations()
        if term_receiver() is not None:
            raise RuntimeError(
                "loss terms of layers must be collected for the whole batch: got a schedule with a "
                "loss for each micro-batch. Return them from the layers, or write "
                "schedule='fill_drain'."
            )
        [piece] = self.microbatching.split(input, 1)
        output = tree_unflatten(code.call(flatten(piece), program))
        return output if program is not None else self._merged([output], input)

    def _merged(self, outputs: Sequence[Any], batch: Any) -> Any:
        return self._sent_back(self.microbatching.merge(outputs, batch))

    def _sent_back(self, output: Any) -> Any:
        """The output, on the device of what is around the stages."""
        layout = self.engine.layout
        last, outside = layout.device_of(layout.n - 1), layout.outside
        if last == outside:
            return output
        return map_tensors(lambda x: x.to(outside) if x.device == last else x, output)

    def _schedule(self, m: int) -> Schedule:
        """The schedule of a mini-batch of ``m`` micro-batches."""
        placement = self.engine.layout.placement
        if not torch.is_grad_enabled():
            return fill_drain(m, placement)
        recomputed = count_recomputed(self.activation_checkpointing, m)
        return fill_drain(m, placement, recomputed=recomputed, split=self.split_backward)


class Handles:
    """Several handles as one."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all of them."""
        for handle in self._handles:
            handle.remove()


def check_settings(
    chunks: int,
    activation_checkpointing: ActivationCheckpointing,
    microbatching: MicroBatching | None,
    around: str = "last",
) -> None:
    """Refuse settings of the wrong type or an impossible value."""
    check_around(around)
    check_chunks(chunks)
    check_activation_checkpointing(activation_checkpointing)
    check_microbatching(microbatching)


def _alone(value: Any) -> FlatTree:
    return joined([value])


def _connect(
    layout: Layout,
    workers: Workers | None,
    connection: Connection | None,
    number: int,
    *,
    threads: bool,
) -> Transport:
    """A transport between the workers."""
    # Pipelines over the same processes take turns, as those over the same threads do.
    turns = workers.exclusion if workers is not None and layout.spread else None
    runner: LocalTransport | InlineTransport = InlineTransport(layout, turns)
    if threads and len(layout.workers_here) > 1:
        runner = LocalTransport(layout, workers)
    if not layout.spread:
        return runner
    assert connection is not None, "several owners are joined before"
    transport = ProcessGroupTransport(layout, runner, connection, number)
    transport.start()
    return transport

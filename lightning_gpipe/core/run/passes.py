"""The passes of one mini-batch through the stages of this process.

They are made when forward begins, and again if it runs again because layers draw random numbers.
All of them share a record of the leaves that took part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Context, Randomness, RowWatch
from lightning_gpipe.core.plan import Schedule
from lightning_gpipe.core.run.asides import Asides
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import Work

_NOBODY = Participation(())


class Passes:
    """The passes of one forward, and of its backward.

    Args:
        passes: One through each stage, in order.
        participation: Records the leaves that take part.
    """

    def __init__(
        self, passes: Sequence[StagePass] = (), participation: Participation | None = None
    ) -> None:
        self._passes = passes
        self._by_stage = {each.stage.partition.index: each for each in passes}
        self._participation = participation or _NOBODY

    def __iter__(self) -> Iterator[StagePass]:
        return iter(self._passes)

    def of(self, stages: Sequence[int]) -> dict[int, StagePass]:
        """Those through some stages, by the index of the stage."""
        return {j: self._by_stage[j] for j in stages}

    def finish_forward(self, everywhere: Sequence[nn.Parameter]) -> list[Tensor]:
        """Check what layers did in forward.

        Args:
            everywhere: Parameters of stages of other processes that have values here too.

        Returns:
            The leaves whose gradients backward will compute.
        """
        for each in self._passes:
            each.finish_forward()
        return self._participation.leaves(everywhere)

    @property
    def foreign_leaves(self) -> list[Tensor]:
        """Those that layers captured and are no parameters of the pipeline."""
        return self._participation.foreign_leaves

    @property
    def asides(self) -> list[Asides]:
        """What watches the leaves of each."""
        return [each.asides for each in self._passes]

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in passes that will have no backward."""
        for each in self._passes:
            each.asides.refuse_gradients()

    def check(self) -> None:
        """Raise if backward would not be that of what forward computed."""
        for each in self._passes:
            each.asides.check()
            each.check_unchanged()

    def take_gradients(self) -> list[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """For each stage its index, and the leaves that have gradients with these."""
        return [(each.stage.partition.index, each.take_gradients()) for each in self._passes]

    def release(self) -> list[Asides]:
        """Free everything, and let gradients raise that arrive in leaves that are alive yet.

        They belong to a graph that somebody else holds.
        """
        asides = [each.release() for each in self._passes]
        self._passes, self._by_stage, self._participation = (), {}, _NOBODY
        for aside in asides:
            aside.refuse_gradients()
        return asides


NO_PASSES = Passes()


def begin_passes(
    stages: Sequence[Stage],
    works: Sequence[Work],
    schedule: Schedule,
    context: Context,
    watches: Sequence[RowWatch | None],
    randomness: Callable[[Stage], Randomness],
    values: Mapping[int, Tensor],
    *,
    spread: bool,
    terms: bool,
) -> Passes:
    """New passes through the stages of this process.

    Args:
        stages: The stages.
        works: What each of them runs.
        schedule: What is run when; tells which micro-batches are recomputed.
        context: The caller's thread-local state.
        watches: For each stage, what notices layers that mix the rows.
        randomness: Tells what a stage draws from.
        values: Those of parameters that another process has, by their ids.
        spread: Whether other processes have stages too.
        terms: Whether to collect loss terms.
    """
    recomputed = [schedule.recomputed(stage.partition.index) for stage in stages]
    shadows = [
        stage.shadows(grad=context.grad, recomputed=bool(some), values=values)
        for stage, some in zip(stages, recomputed, strict=True)
    ]
    participation = Participation(shadows, spread=spread)
    passes = [
        StagePass(
            stage,
            works[k],
            context,
            recomputed[k],
            randomness(stage),
            shadows[k],
            participation,
            watches[k],
            terms=terms,
            split=schedule.split,
        )
        for k, stage in enumerate(stages)
    ]
    return Passes(passes, participation)

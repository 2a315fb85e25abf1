"""The pipelines in a LightningModule, whose forward and steps call their modules as before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.data import Rows
from lightning_gpipe.core.faithful import add_note
from lightning_gpipe.core.frontends import candidates, is_installed, on_meta
from lightning_gpipe.core.layout import check_balance, check_even, check_initialised
from lightning_gpipe.core.pipeline import (
    GPipe,
    PipedModule,
    Pipeline,
    Requested,
    parameters_around,
    piped_modules_at,
    resolve,
)
from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.core.verify import FirstBatchVerifier, Verdict
from lightning_gpipe.strategy.default_modules import default_modules
from lightning_gpipe.strategy.options import StrategyOptions
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.refusals import (
    AUTO_DEVICES,
    metrics_on_meta,
    refuse_pipelines,
    warn_of_one_device,
)
from lightning_gpipe.strategy.resuming import MeasuredBalances
from lightning_gpipe.strategy.sample import entries_in, optimizers_of

_UNVERIFIED = (
    "The first batch, or a few rows of it, is compared before the first step. To train all the "
    "same, write verify=False."
)
_CHUNKS_PER_STAGE = 4  # Huang et al., "GPipe" (2019), section 2.3: the bubble is negligible


def piped_modules_of(
    root: nn.Module, options: StrategyOptions, *, several: bool = True
) -> list[PipedModule]:
    """Return the piped modules at the user's paths or, without a path, those with the work."""
    refuse_pipelines(root)
    check_initialised(root, type(root).__name__)
    if options.module is not None:
        return piped_modules_at(root, options.module, options.balances)
    one = options.requested(1, options.schedule).planned or is_by_micro_batch(options.schedule)
    return default_modules(
        root, options.balance, several=several and not one, traced=options.microbatching is None
    )


class PipelinedModule:
    """The pipelines in a LightningModule, the same in all processes.

    ``measured_balances`` has earlier ones, and gets new ones; ``measured`` measures in any case.
    """

    def __init__(
        self,
        trainer: Trainer,
        processes: Processes,
        measured_balances: MeasuredBalances,
        *,
        measured: bool,
    ) -> None:
        root, settings = trainer.lightning_module, processes.options
        devices = processes.workers
        self.modules = piped_modules_of(root, settings)
        balances = settings.balances * (1 if settings.module else len(self.modules))
        sought = _requested(root, settings, len(devices))
        balances_known = measured_balances.known(self.modules, balances, len(devices), sought)
        stages = [len(each) for each in balances_known if not isinstance(each, str)]
        requested = _requested(root, settings, max([len(devices), *stages]))
        if trainer.state.fn != TrainerFn.FITTING and measured_balances.plan is not None:
            requested = requested.planned_as(measured_balances.plan)
        by_memory = requested.planned or "memory" in map(str, balances)
        choice = resolve(
            self.modules,
            balances_known,
            requested,
            partial(entries_in, root, trainer, self.modules),
            devices,
            around=settings.around,
            microbatching=settings.microbatching,
            optimizer=optimizers_of(root, trainer) if by_memory else None,
            agree=processes.broadcast,
            measured=measured,
        )
        sizes = choice.balances
        chained = choice.order.by_micro_batch
        stages = [sum(map(len, sizes))] if chained else list(map(len, sizes))
        _check_sizes(self.modules, sizes, stages, len(devices))
        if choice.weights == "device":
            warn_of_one_device(balances, sizes, len(devices))
        measured_balances.keep(self.modules, balances, choice)
        self._root = root
        self._settings = settings
        self._verifier: FirstBatchVerifier | None = None
        self._reported: set[tuple[str, bool]] = set()  # the faster way of each module
        self._first = True  # whether no batch has run
        by_default = _CHUNKS_PER_STAGE * max(stages)
        self.pipeline = GPipe(
            root,
            sizes,
            module=self.modules,
            devices=devices,
            chunks=by_default if settings.chunks is None else choice.chunks,
            activation_checkpointing=choice.activation_checkpointing,
            deferred_batch_norm=settings.deferred_batch_norm,
            microbatching=settings.microbatching,
            threads=settings.threads,
            cores=settings.cores,
            split_backward=choice.split_backward,
            around=settings.around,
            chained=chained,
            folded=settings.folded(len(devices)),
            weights=choice.weights,
            offload_activations=choice.offload_activations,
            **processes.of_pipeline(),
        )
        if settings.verify is True and not choice.order.by_micro_batch:  # else steps are verified
            self._verifier = FirstBatchVerifier(self.modules, report)
        self.pipeline.plan, self.pipeline.profiles = choice.plan, list(choice.profiles)
        self.schedule = choice.schedule

    @property
    def single(self) -> Pipeline | None:
        """The pipeline, of a module or a chain of them, if there is one."""
        return self.pipeline.only if len(self.pipeline.layouts) == 1 else None

    def around(self) -> list[nn.Parameter]:
        layouts = self.pipeline.layouts
        shared = {id(parameter) for layout in layouts for parameter in layout.everywhere}
        inside = {
            id(parameter)
            for layout in layouts
            for partition in layout.partitions
            for parameter in partition.parameters
        }
        return [p for p in self._root.parameters() if id(p) in shared or id(p) not in inside]

    def shared(self) -> set[int]:
        """Return the ids of parameters around the stages that code of any process may use.

        Those that stages have, too, and those of recurrent modules, which hold on to their weights.
        """
        modules = [x for x in self._root.modules() if isinstance(x, nn.RNNBase)]
        used = [parameter for module in modules for parameter in module.parameters()]
        return set(map(id, [*used, *(p for x in self.pipeline.layouts for p in x.everywhere)]))

    @property
    def inner(self) -> Collection[int]:
        """The places of the processes that need not run the user's steps, but know their calls.

        They have neither the first stage nor the last, and rows are divided without their values.
        """
        rows = type(self._settings.microbatching) in (type(None), Rows)
        if len(self.modules) > 1 or not rows or self._settings.verify is True:
            return frozenset()
        return {*self.pipeline.layout.owners} - self.pipeline.layout.ends

    @property
    def run_by_ends(self) -> bool:
        layout = self.pipeline.layout
        return {*layout.owners} == layout.ends | {*self.inner}

    def norms_around(self) -> dict[str, _BatchNorm]:
        inside, found = modules_inside(self.pipeline), self._root.named_modules()
        return {path: x for path, x in found if isinstance(x, _BatchNorm) and x not in inside}

    def elsewhere(self) -> set[str]:
        here: dict[bool, set[nn.Module]] = {True: set(), False: set()}
        for layout in self.pipeline.layouts:
            for j, partition in enumerate(layout.partitions):
                here[layout.owner_of(j) == layout.rank].update(partition.modules)
        foreign = here[False] - here[True]
        return {path for path, module in self._root.named_modules() if module in foreign}

    def say_ways(self) -> None:
        """Report once whether threads or one thread run a pipeline, when it is measured.

        The first batch also tells if it has fewer micro-batches than the user asks for.
        """
        if self._first and (timeline := self.pipeline.timeline) is not None:
            self._first, chunks = False, self.pipeline.chunks
            if (m := timeline.schedule.m) < chunks:
                rank_zero_info(
                    f"GPipe: the first batch has rows for {m} micro-batches only, fewer than "
                    f"chunks={chunks}, so the bubble is larger. Larger batches make it smaller."
                )
        for piped, way in zip(self.modules, self.pipeline.ways, strict=True):
            if way is not None and (piped.name, way.faster) not in self._reported:
                self._reported.add((piped.name, way.faster))
                rank_zero_info(f"GPipe runs {piped.name} on {way}.")

    def remove(self) -> None:
        if self._verifier is not None:
            self._verifier.remove()
        self.pipeline.release()
        self.pipeline.close()

    def __str__(self) -> str:
        """A line for each module with its cut, the rest and what could be piped; the plan."""
        lines = []
        for piped in self.modules:
            layout = piped.pipeline.layout
            cut = ", ".join(f"{layout.partitions[j]} on {layout.where(j)}" for j in piped.stages)
            kind = type(piped.module).__name__
            lines.append(f"GPipe runs {piped.name} ({kind}) as a pipeline: {cut}")
        beside = parameters_around(self.modules)
        if beside:
            total = sum(parameter.numel() for parameter in self._root.parameters())
            lines[-1] += (
                f"; around, on {self.pipeline.layout.outside}: {beside:,} parameters, "
                f"{beside / total:.0%} of all"
            )
        inside = {module for piped in self.modules for module in piped.module.modules()}
        others = [
            path for path, x in candidates(self._root).items() if inside.isdisjoint(x.modules())
        ]
        if others:
            paths = [*(piped.path for piped in self.modules), *others]
            lines[-1] += (
                f"; not piped: {', '.join(map(repr, others))} (module={paths} pipes them too)"
            )
        if (shards := self._settings.tensor_parallel) > 1:
            lines.append(
                f"Each stage is divided among {shards} devices, of which these have a shard"
            )
        if self.pipeline.plan is not None:
            lines.append(f"GPipe's plan is {self.pipeline.plan}")
        return ".\n".join(lines) + "."


def _requested(root: LightningModule, settings: StrategyOptions, stages: int) -> Requested:
    # A training_step that calls backward itself is for a whole batch.
    whole = settings.schedule == "auto" and not root.automatic_optimization
    schedule = "fill_drain" if whole else settings.schedule
    return settings.requested(_CHUNKS_PER_STAGE * stages, schedule)


def _check_sizes(
    modules: Iterable[PipedModule],
    sizes: Iterable[Sequence[int]],
    stages: Iterable[int],
    devices: int,
) -> None:
    """Check the balance of each module, and the number of stages of each pipeline."""
    for piped, size in zip(modules, sizes, strict=True):
        check_balance(size, len(piped.frontend.units), piped.name)
    for number in stages:
        check_even(number, devices, f"Write Trainer(devices={number}). {AUTO_DEVICES}")


def modules_inside(pipeline: GPipe) -> set[nn.Module]:
    """Return the modules in the stages of all processes."""
    partitions = (partition for layout in pipeline.layouts for partition in layout.partitions)
    return {module for partition in partitions for module in partition.modules}


def must_stay(root: nn.Module) -> bool:
    """Return True if a failed setup left meta tensors, or another Trainer's pipeline is in use."""
    pipelined = any(map(is_installed, root.modules()))
    return pipelined or on_meta(root) or bool(metrics_on_meta(root))


def report(verdict: Verdict) -> None:
    """Report the result of a verification; raise RuntimeError for an unexplained difference."""
    try:
        verdict.check()
    except RuntimeError as error:
        add_note(error, _UNVERIFIED)
        raise
    (rank_zero_info if verdict.difference is None else rank_zero_warn)(str(verdict))
    verdict.warn_of_kept()

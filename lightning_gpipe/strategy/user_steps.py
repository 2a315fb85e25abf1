"""The steps of a LightningModule with a pipeline, which must run it and not go around it.

``for layer in self.layers: x = layer(x)``, the usual way to write a transformer, never calls the
nn.Sequential: the loss is right, and nothing is pipelined. Nor does ``self.layers[:3](x)``, or
another module in its place. A training step that does this is refused; a step in evaluation is
warned of. One that needs no layer at all, as in a GAN that trains its parts in turns, must not be
refused. So before the first run, and after a step without one, hooks on the layers record which of
them run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_gpipe.core.faithful import NOTHING, Bracket, LazyManagers, Manager, add_note
from lightning_gpipe.core.layout import layers_of
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.core.verify import FirstBatchVerifier
from lightning_gpipe.strategy.last_outputs import LastOutputs
from lightning_gpipe.strategy.micro_batch_steps import InWrapper, MicroBatchSteps
from lightning_gpipe.strategy.pipelined import PipelinedModule, report


class UserSteps:
    """Runs the steps of a LightningModule.

    ``verify`` tells to verify the first training batch, if each micro-batch has a loss, or a few
    rows of it. ``last`` runs steps whose outputs are for the last stage; None if all processes get
    them.
    """

    def __init__(
        self,
        module: L.LightningModule,
        piped: PipelinedModule,
        *,
        verify: bool | Literal["sample"],
        in_wrapper: InWrapper,
        last: LastOutputs | None,
    ) -> None:
        self._module = module
        self._in_wrapper = in_wrapper
        self.last = last
        self._piped = piped
        self._checks = [BypassCheck(module, each, piped.modules) for each in piped.modules]
        self._spread = piped.pipeline.layout.spread
        self._by_micro_batch: MicroBatchSteps | None = None
        if is_by_micro_batch(piped.schedule):
            self._by_micro_batch = MicroBatchSteps(
                piped.schedule, module, piped.pipeline, verify, in_wrapper
            )
        # Whether steps of training, and of evaluation, are to be verified by a few rows.
        sampled = bool(verify) and not self._spread
        self._to_sample = {
            True: sampled and verify == "sample" and self._by_micro_batch is None,
            False: sampled,
        }

    @property
    def readers(self) -> Collection[int] | None:
        """The places in the pipeline of the processes that read a batch; None for all."""
        verifies = self._by_micro_batch is not None and self._by_micro_batch.verifies
        if self.last is None or self.last.have_batches or verifies or not self._piped.inner:
            return None
        return self._piped.pipeline.layout.ends

    def training(
        self,
        step: Callable[..., Any],
        precision: Precision,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of ``training_step``, which ``step`` calls once, for all rows."""
        if self.last is not None:
            step = partial(self._at_last, self.last, precision)
        elif self._by_micro_batch is not None:
            step = partial(self._by_micro_batch.run, precision)
        run: Callable[[], Any] = partial(step, *args, **kwargs)
        automatic = self._module.automatic_optimization
        for check in self._checks:
            run = partial(check.training, run, automatic=automatic)
        if self._spread:
            run = partial(self._compared, run, training=True)
        with self._sample(trains=True):
            result = run()
        self._piped.say_ways()
        return result

    def _at_last(self, last: LastOutputs, precision: Precision, *args: Any, **kwargs: Any) -> Any:
        if self._by_micro_batch is not None:
            run = partial(self._by_micro_batch.run, precision, *args, **kwargs)
            return last.run(run, trains=True, logging=precision.train_step_context)
        run = partial(self._module.training_step, *args, **kwargs)
        with precision.train_step_context():
            return self._in_wrapper(partial(last.run, run, trains=True))

    def _sample(self, *, trains: bool) -> Manager:
        """Verify a few rows of the input in the first step of evaluation, and of a new fit."""
        if not self._to_sample[trains] or (trains and self._module.global_step):
            return NOTHING
        self._to_sample[trains] = False
        verifier = partial(FirstBatchVerifier, sample=True, around=self._module, trains=trains)
        begin = partial(verifier, self._piped.modules, report)
        return Bracket(begin, FirstBatchVerifier.remove)

    def _compared(self, step: Callable[[], Any], *, training: bool) -> Any:
        """Run a step, and compare the processes if it runs no mini-batch, which compares them.

        If the others ran one, this process would be a step ahead from then on: raises OutOfStep.
        """
        module, engine = self._module, self._piped.pipeline.engine
        if training:
            for piped in self._piped.modules:
                piped.pipeline.engine.step = module.global_step
        before = engine.serial
        with engine.telling():
            result = step()
        # Lightning itself refuses a training step without a result.
        if not training or result is not None or not module.automatic_optimization:
            engine.check_run(since=before)
        return result

    def evaluation(self, name: str, run: Callable[[], Any]) -> Any:
        if self.last is not None and name != "predict_step":  # which may call the model repeatedly
            run = partial(self.last.run, run, trains=False)
        for check in self._checks:
            run = partial(check.evaluation, name, run)
        if self._spread:
            run = partial(self._compared, run, training=False)
        with self._sample(trains=False):
            return run()


class BypassCheck:
    """Checks that the steps of a LightningModule run one of its pipelines.

    A step is warned of if it runs none of ``together``, all pipelined modules.
    """

    def __init__(
        self, root: nn.Module, piped: PipedModule, together: Sequence[PipedModule]
    ) -> None:
        self._root = root
        self._piped = piped
        self._name = ".".join(filter(None, [type(root).__name__, piped.path]))
        self._here = ".".join(filter(None, ["self", piped.path]))
        self._together = together
        self._record = True  # which layers run in the next training step
        self._settled: set[str] = set()  # the steps that ran the pipeline, or were warned of

    def training(self, step: Callable[[], Any], *, automatic: bool) -> Any:
        """Return the result of ``step``; None skips the batch if optimization is ``automatic``."""
        name, runs, total = "training_step", self._piped.runs, self._total()
        if not self._record:
            result, around = step(), None
        else:
            ran: list[int] = []
            with self._recorded(ran):
                try:
                    result = step()
                except Exception as error:
                    if ran and self._piped.runs == runs:
                        add_note(error, self._bypassed(name, ran))  # on other devices it may fail
                    raise
            around = self._bypassed(name, ran) if ran else None
        self._record = self._piped.runs == runs
        if not self._record:
            self._settled.add(name)
        elif around is not None or self._replaced:
            raise RuntimeError(self._replacement(name) if self._replaced else around)
        elif not (automatic and result is None) and self._total() == total:
            self._warn_once(name)
        return result

    def evaluation(self, name: str, step: Callable[[], Any]) -> Any:
        if name in self._settled:
            return step()
        total = self._total()
        result = step()
        if self._total() == total:
            self._warn_once(name)
        self._settled.add(name)
        return result

    def _warn_once(self, name: str) -> None:
        if name in self._settled:
            return
        self._settled.add(name)
        if self._replaced:
            rank_zero_warn(self._replacement(name))
        else:
            cure = (
                f" If it loops over {self._here}, takes a slice of it or calls its layers one by "
                f"one, nothing is pipelined: write {self._here}(x). A copy of it, such as an "
                "average of models, runs without a pipeline."
            )
            rank_zero_warn(
                f"{name} did not run the pipeline {self._name}.{cure if self._layers else ''}"
            )

    def _total(self) -> int:
        return sum(piped.runs for piped in self._together)

    def _recorded(self, ran: list[int]) -> Manager:
        # A scripted layer takes no hooks; one compiled in place would compile them.
        return LazyManagers(
            lambda: (
                layer.register_forward_pre_hook(partial(_record, ran, k))
                for k, layer in enumerate(self._layers)
                if not isinstance(layer, torch.jit.ScriptModule)
                and layer._compiled_call_impl is None
            )
        )

    @property
    def _layers(self) -> list[nn.Module]:
        """The layers that must not run one by one; only a Sequential has such layers."""
        module = self._piped.module
        return list(layers_of(module).values()) if isinstance(module, nn.Sequential) else []

    @property
    def _replaced(self) -> bool:
        modules = dict(self._root.named_modules(remove_duplicate=False))
        return modules.get(self._piped.path) is not self._piped.module

    def _bypassed(self, name: str, ran: list[int]) -> str:
        layers = ", ".join(map(str, dict.fromkeys(ran)))
        return (
            f"{name} must call {self._name}, which runs as a pipeline: it ran the layers {layers} "
            f"one by one instead, as `for layer in {self._here}` and {self._here}[:k](x) do. Write "
            f"{self._here}(x). What happens between two layers belongs into a layer, and a tensor "
            "that a later layer needs into a skip connection, see lightning_gpipe.skip."
        )

    def _replacement(self, name: str) -> str:
        return (
            f"{self._name} must stay the module that was set up as the pipeline: {name} found "
            "another one in its place, which is not pipelined. Replace it before the pipeline is "
            "set up: in __init__, setup or configure_model."
        )


def _record(ran: list[int], k: int, *_: Any) -> None:
    ran.append(k)

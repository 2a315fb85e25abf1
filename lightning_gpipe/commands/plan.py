"""Plans a pipeline for devices that need not be present: ``python -m lightning_gpipe plan``.

    python -m lightning_gpipe plan --config config.yaml --devices 8 --device-memory 24GiB

The configuration is that of LightningCLI's ``fit``. Model and data are made as for a fit, which
ends where the strategy would be set up. There the layers are measured, one by one, on the CPU or on
one GPU. The operations of a model on the meta device, made in ``configure_model``, are counted.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from lightning_gpipe.commands.fit import fit_one_step
from lightning_gpipe.commands.places import places_of, stages_places
from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.pipeline import LayerMeasurement, Requested, plan_measured
from lightning_gpipe.core.planner import NoPlan, Plan
from lightning_gpipe.core.schedules import SCHEDULES
from lightning_gpipe.core.show import check_can_draw_to, plan_picture, show_plan
from lightning_gpipe.strategy import GPipeStrategy, entries_in, optimizers_of


def plan_command(arguments: Sequence[str]) -> int:
    """Print a plan for a configuration; return the exit status, 1 if there is none."""
    options, others = _parser().parse_known_args(list(arguments))
    try:
        places, operations = places_of(
            options.devices,
            _listed(options.device_memory),
            _listed(options.device_speed),
            options.host_speed,
            options.replica_speed,
        )
        if options.plot is not None:
            check_can_draw_to(options.plot)
        with redirect_stdout(sys.stderr):  # for what the user's code prints
            planning = _plan(others, places, operations, options)
    except NoPlan as error:
        print(f"{error}", file=sys.stderr)
        if options.json:
            print(json.dumps(error.as_dict()))
        else:
            show_plan(Plan(error.nearest))
        return 1
    except Exception as error:  # of the user's model too
        notes = getattr(error, "__notes__", [])
        print("\n".join([f"{type(error).__name__}: {error}", *notes]), file=sys.stderr)
        return 1
    plan, settings = planning.plan, planning.settings
    shards, replicas = settings.tensor_parallel, settings.replicas
    assert plan is not None, "the strategy was set up"
    if options.json:
        sizes = {"tensor_parallel": shards, "replicas": replicas}
        print(json.dumps({**plan.as_dict(), **sizes}))
    else:
        show_plan(plan)
        if replicas > 1:
            print(
                f"replicas={replicas}: the devices above are those of one replica. What replicas "
                "send one another for averages is not predicted."
            )
        if shards > 1:
            print(
                f"tensor_parallel={shards}: a device above stands for {shards}, among which "
                "parallelize_module divides a stage evenly. What these send one another is not "
                "predicted, nor what is not divided."
            )
    if options.plot is not None:
        plan_picture(plan.prediction).savefig(options.plot)
    return 0


class _Planned(BaseException):
    """Ends a fit once there is a plan."""


class _Planning(CPUAccelerator):
    """An accelerator whose setup, which precedes the strategy's, plans the pipeline."""

    def __init__(self, places: list[Place], operations: float | None, options: Namespace) -> None:
        self.plan: Plan | None = None
        self.settings = GPipeStrategy().options  # the user's
        self._places, self._operations, self._options = places, operations, options

    def of_one_process(self, strategy: GPipeStrategy) -> GPipeStrategy:
        """Return the strategy without replicas and shards, for this process measures alone."""
        self.settings = options = strategy.options
        if options.replicas == options.tensor_parallel == 1:
            return strategy
        alone = {"tensor_parallel": 1, "replicas": 1, "sharding": None, "ddp": None}
        if options.processes == "single":
            alone |= {"lost_after": None, "process_group_backend": None}
        return GPipeStrategy(**{**vars(options), **alone})

    @override
    def setup(self, trainer: Trainer) -> None:
        strategy, module, settings = trainer.strategy, trainer.lightning_module, self.settings
        assert isinstance(strategy, GPipeStrategy), "the Planner sees to it"
        assert isinstance(module, LightningModule), "it is fitted"
        modules = strategy.piped_modules(module, several=False)
        if len(modules) > 1:
            raise ValueError(
                f"a plan is for one pipeline: got {len(modules)}, "
                f"{', '.join(each.name for each in modules)}. Give module= one path."
            )
        places = stages_places(self._places, settings.replicas, settings.tensor_parallel)
        measuring = LayerMeasurement(
            modules,
            partial(entries_in, module, trainer, modules),
            [torch.device(self._options.measure_on)] * len(places),
            microbatching=settings.microbatching,
            optimizer=optimizers_of(module, trainer),
            split=True,
        )
        if self._operations is not None and not measuring.counts:
            raise ValueError(
                "--device-speed in operations per second is for layers that are counted: they "
                "are measured in seconds. Add --measure-on meta, or write a factor, how many "
                "times as fast each device is as this one."
            )
        options = self._options
        free = settings.tensor_parallel == 1 and settings.sharding is None
        self.plan = plan_measured(
            measuring,
            places,
            Requested(
                "auto" if options.chunks is None else options.chunks,
                "auto",
                options.schedule or settings.schedule,
                True if settings.split_backward is True else "auto",
                options.weights or settings.weights,
                "auto" if options.offload_activations else settings.offload_activations,
                "auto" if free else settings.sharding,
                settings.replicas,
            ),
            options.stages,
            None,
            settings.around,
            self._operations,
        )
        raise _Planned


def _plan(
    others: Sequence[str], places: list[Place], operations: float | None, options: Namespace
) -> _Planning:
    planning = _Planning(places, operations, options)

    class Planner(LightningCLI):
        @override
        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            strategy = _pipelined(self._get(self.config_init, "trainer")["strategy"])
            if isinstance(strategy, GPipeStrategy):
                strategy = planning.of_one_process(strategy)
            return super().instantiate_trainer(
                **kwargs, accelerator=planning, devices=1, strategy=strategy
            )

    try:
        with suppress(_Planned):
            fit_one_step(others, Planner)
    except SystemExit as error:  # of LightningCLI
        raise ValueError(
            "a plan needs a model, and data or an example_input_array, in arguments that "
            "LightningCLI takes: the lines above say what it does not. Write --config config.yaml, "
            "as for python -m lightning_gpipe fit, and the options of plan --help."
        ) from error
    return planning


def _pipelined(configured: Strategy | str) -> Strategy | str:
    """Return the configured strategy if it is a GPipeStrategy, or else the default one.

    Others move the model to the CPU, even from meta, and may not start without their devices.
    """
    kind: object = type(configured)
    if isinstance(configured, str) and configured in StrategyRegistry:
        kind = StrategyRegistry[configured]["strategy"]
    is_pipeline = isinstance(kind, type) and issubclass(kind, GPipeStrategy)
    return configured if is_pipeline else GPipeStrategy()


def _listed(values: Sequence[str]) -> list[str]:
    return [item for value in values for item in value.split(",")]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m lightning_gpipe plan",
        description="Chooses stages, balance, micro-batches and recomputation for devices that "
        "need not be there. Give --config, and any option of LightningCLI's fit.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", type=int, help="their number, whatever trainer.devices is; 1 by default")
    add("--device-memory", nargs="+", default=[], metavar="24GiB", help="of all, or of each")
    add(
        "--device-speed",
        nargs="+",
        default=[],
        metavar="2",
        help="how many times as fast as this machine; or, of layers that are counted, 312TFLOPS",
    )
    add(
        "--host-speed",
        metavar="20GB/s",
        help="of the way between the memory of the host and each device",
    )
    add(
        "--replica-speed",
        metavar="50GB/s",
        help="of the way between a device and those of other replicas; by default it takes no time",
    )
    add("--weights", choices=["device", "host", "auto"], help="where they are between their uses")
    add("--offload-activations", action="store_true", help="whether they may wait on the host")
    add("--stages", type=int, help="their number; by default what is fastest")
    add("--chunks", type=int, help="the number of micro-batches; by default what is fastest")
    names = [*SCHEDULES, "auto"]
    add("--schedule", choices=names, help="what runs when; auto: what is fastest of all")
    add("--measure-on", default="cpu", metavar="DEVICE", help="cpu, cuda, or meta to count")
    add("--plot", metavar="PLAN.PNG", help="where to draw the timeline and the memory")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser

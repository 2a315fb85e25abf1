"""Plans a pipeline for devices that need not be there: ``python -m lightning_gpipe plan``.

    python -m lightning_gpipe plan --config config.yaml --devices 8 --device-memory 24GiB

The configuration is one of LightningCLI's ``fit``. Its model and data are made as for a fit, which
ends where the strategy would set up: the layers are measured then, one by one, on the CPU or on one
GPU. A model on the meta device, made in ``configure_model``, is counted and not run.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from lightning_gpipe.check import OF_ONE_STEP
from lightning_gpipe.core.pipeline import Measuring, profiles_of, rows_of
from lightning_gpipe.core.plan import ORDERS, NoPlan, Place, Plan, plan_for
from lightning_gpipe.core.show import check_can_draw, plan_picture, show_plan
from lightning_gpipe.device_options import places_of
from lightning_gpipe.sampled import entries_in, optimizers_of
from lightning_gpipe.strategy import GPipeStrategy


def plan_command(arguments: Sequence[str]) -> int:
    """Plan what the arguments name, and print it.

    Args:
        arguments: Those after ``plan``.

    Returns:
        The exit status: 1 if there is no plan.
    """
    options, others = _parser().parse_known_args(list(arguments))
    try:
        places, operations = places_of(
            options.devices, _listed(options.device_memory), _listed(options.device_speed)
        )
        if options.plot is not None:
            check_can_draw()
        with redirect_stdout(sys.stderr):  # what the user's code prints is no plan
            found = _planned(others, places, operations, options)
    except NoPlan as error:
        print(f"{error}", file=sys.stderr)
        if options.json:
            print(json.dumps(error.as_dict()))
        else:
            show_plan(Plan(error.nearest))
        return 1
    except Exception as error:  # whatever the user's model raises stands in the way
        notes = getattr(error, "__notes__", [])
        print("\n".join([f"{type(error).__name__}: {error}", *notes]), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        show_plan(found)
    if options.plot is not None:
        plan_picture(found.prediction).savefig(options.plot)
    return 0


class _Ended(BaseException):
    """Ends a fit when there is a plan."""


class _Planning(CPUAccelerator):
    """An accelerator that plans when the strategy is set up, before anything has moved.

    Args:
        places: The devices.
        operations: The operations that the first makes in a second, if that is given.
        options: Those of the command.

    Attributes:
        plan: The plan, once there is one.
    """

    def __init__(self, places: list[Place], operations: float | None, options: Namespace) -> None:
        self.plan: Plan | None = None
        self._places, self._operations, self._options = places, operations, options

    @override
    def setup(self, trainer: Trainer) -> None:
        given = trainer.strategy
        assert isinstance(given, GPipeStrategy), "the Planner sees to it"
        module = trainer.lightning_module
        assert isinstance(module, LightningModule), "it is fitted"
        found = given.taken(module)
        if len(found) > 1:
            raise ValueError(
                f"a plan is for one pipeline: got {len(found)}, "
                f"{', '.join(taken.name for taken in found)}. Give module= one path."
            )
        measuring = Measuring(
            found,
            partial(entries_in, module, trainer, found),
            [torch.device(self._options.measure_on)] * len(self._places),
            microbatching=given.microbatching,
            optimizer=optimizers_of(module, trainer),
            split=True,
        )
        self.plan = self._plan(measuring, given)
        raise _Ended

    def _plan(self, measuring: Measuring, given: GPipeStrategy) -> Plan:
        asked = self._options
        profiles = profiles_of(measuring, asked.chunks, len(self._places))
        rows = rows_of(profiles)
        if self._operations is not None:
            if not measuring.counts:
                raise ValueError(
                    "--device-speed in operations per second is for layers that are counted: they "
                    "were measured in seconds. Add --measure-on meta, or write a factor, how many "
                    "times as fast each device is as this one."
                )
            profiles = [each.in_seconds(self._operations) for each in profiles]
        return plan_for(
            profiles,
            self._places,
            rows=rows,
            stages=asked.stages,
            chunks=asked.chunks,
            most=measuring.most(16 * len(self._places)),
            schedule=asked.schedule or given.schedule,
            split_backward=True if given.split_backward is True else None,
            around=given.around,
        )


def _planned(
    others: Sequence[str], places: list[Place], operations: float | None, options: Namespace
) -> Plan:
    """Begin a fit, until there is a plan."""
    planning = _Planning(places, operations, options)

    class Planner(LightningCLI):
        @override
        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            strategy = _pipelined(self._get(self.config_init, "trainer")["strategy"])
            return super().instantiate_trainer(
                **kwargs, accelerator=planning, devices=1, strategy=strategy
            )

    overrides = [f"--trainer.{name}={value}" for name, value in OF_ONE_STEP.items()]
    with suppress(_Ended), _explained():
        Planner(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            args=["fit", *others, *overrides],
        )
    assert planning.plan is not None, "the strategy was set up"
    return planning.plan


def _pipelined(configured: Strategy | str) -> Strategy | str:
    """The configured strategy if it is a pipeline, or else one of ours.

    Lightning's strategies move the model to the CPU as they end, which a model on the meta device
    cannot, and some do not start without the devices that they are for.
    """
    made: object = type(configured)
    if isinstance(configured, str) and configured in StrategyRegistry:
        made = StrategyRegistry[configured]["strategy"]
    is_ours = isinstance(made, type) and issubclass(made, GPipeStrategy)
    return configured if is_ours else GPipeStrategy()


@contextmanager
def _explained() -> Iterator[None]:
    """Explain why LightningCLI ends the process in a ``with`` block; it has printed what is wrong.

    Raises:
        ValueError: Says what a plan needs.
    """
    try:
        yield
    except SystemExit as error:
        raise ValueError(
            "a plan needs a model, and data or an example_input_array: the configuration has what "
            "the line above says. Write --config config.yaml, as for python -m lightning_gpipe fit."
        ) from error


def _listed(values: Sequence[str]) -> list[str]:
    return [each for value in values for each in value.split(",")]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m lightning_gpipe plan",
        description="Chooses stages, balance, micro-batches and recomputation for devices that "
        "need not be there. Give --config, and any option of LightningCLI's fit.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", type=int, help="the number of devices")
    add("--device-memory", nargs="+", default=[], metavar="24GiB", help="of all, or of each")
    add(
        "--device-speed",
        nargs="+",
        default=[],
        metavar="2",
        help="how many times as fast as this machine; or, of layers that are counted, 312TFLOPS",
    )
    add("--stages", type=int, help="their number; by default what is fastest")
    add("--chunks", type=int, help="the number of micro-batches; by default what is fastest")
    names = [*dict.fromkeys(order.schedule for order in ORDERS), "auto"]
    add("--schedule", choices=names, help="what runs when; auto: what is fastest of all")
    add("--measure-on", default="cpu", metavar="DEVICE", help="cpu, cuda, or meta to count")
    add("--plot", metavar="PLAN.PNG", help="where to draw the timeline and the memory")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser

"""Shows how a model would run as a pipeline, or why it cannot.

``check`` cuts the model on the CPU, without any GPU, prints the stages and, if it gets an input,
compares a step with the plain model:

    python -m lightning_gpipe check torchvision.models.resnet18 --stages 4 --input 3,64,64
    python -m lightning_gpipe check --config config.yaml

The first form takes a class or a function that returns a module. The second takes a configuration
of LightningCLI, and runs one batch of its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import import_object  # type: ignore[attr-defined, unused-ignore]
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe.commands.fit import fit_one_step
from lightning_gpipe.core.frontends import candidates, module_at
from lightning_gpipe.core.layout import check_balance
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.verify import verify
from lightning_gpipe.strategy import GPipeStrategy

_ROWS = 4  # in the input of a step
_INPUT = "sizes of a row of input, as 3,64,64; with spaces between those of several arguments"


def check(arguments: Sequence[str]) -> int:
    """Check a model or a configuration; return 1 if it cannot run as the plain model does, or 0."""
    try:
        if any(argument.startswith("--config") for argument in arguments):
            fit_one_step(arguments, trainer_defaults={"callbacks": [_Listed()]})
            rank_zero_only(print)("A batch was trained and one validated.")
        else:
            _check_model(_parser().parse_args(list(arguments)))
    except Exception as error:  # of the user's model too
        print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        return 1
    return 0


def listing(pipeline: GPipe) -> str:
    """Return a line for each stage of a pipeline, of all processes."""
    lines = []
    partitions = (partition for layout in pipeline.layouts for partition in layout.partitions)
    for j, partition in enumerate(partitions):
        count = sum(parameter.numel() for parameter in partition.parameters)
        lines.append(f"stage {j}: {partition}, {count:,} parameters")
    return "\n".join(lines)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m lightning_gpipe check",
        description="Says how a model would run as a pipeline, or what stands in the way. Or "
        "give --config, and any option of LightningCLI's fit.",
    )
    parser.add_argument("model", type=str, help="the path of a class, or of a function")
    parser.add_argument("--init", type=dict[str, Any], default={}, help="its keyword arguments")
    parser.add_argument("--module", type=str | None, help="the path of what is piped in the model")
    parser.add_argument(
        "--balance",
        type=list[int] | list[str] | Literal["parameters"],
        default="parameters",
        help="as of GPipe",
    )
    parser.add_argument(
        "--stages", type=int | None, help="how many, if the balance leaves it; 2 by default"
    )
    parser.add_argument("--input", type=str | None, help=_INPUT)
    parser.add_argument("--below", type=int | None, help="the input is integers below this one")
    return parser


def _check_model(options: Namespace) -> None:
    model = import_object(options.model)(**options.init)
    if isinstance(model, LightningModule) and not is_overridden("forward", model):
        _add_forward(model, options)
    devices = ["cpu"] * _stages(options.balance, options.stages)
    pipeline = GPipe(model, options.balance, module=options.module, devices=devices, chunks=2)
    with closing(pipeline):
        print(listing(pipeline))
        if options.input is None:
            print("It was not run. Give --input, the sizes of a row, to compare a step.")
            return
        inputs = [_input(sizes, options.below) for sizes in options.input.split() or [""]]
        for training in (True, False):
            parity = verify(pipeline.train(training), *inputs)
            print(f"in {'training' if training else 'evaluation'}, {parity}")
            parity.check()


def _stages(balance: Any, stages: int | None) -> int:
    if stages is not None and stages < 1:
        raise ValueError(f"--stages must be 1 or more: got {stages}.")
    if not isinstance(balance, list):
        return 2 if stages is None else stages
    named = bool(balance) and isinstance(balance[0], str)
    if not named:
        check_balance(balance)
    if stages not in (None, len(balance)) and not named:
        raise ValueError(
            f"--stages and --balance must be of as many stages: got {stages} and "
            f"{len(balance)}. Leave out --stages."
        )
    return len(balance) + named


def _add_forward(model: LightningModule, options: Namespace) -> None:
    """Let a model without a forward call the module of the options with the input."""
    module = None if options.module is None else module_at(model, options.module)
    if module is None or (isinstance(module, nn.ModuleList) and options.input is not None):
        calls = "".join(
            f", or --module {path}, to call it with the input"
            for path, each in candidates(model).items()
            if isinstance(each, nn.Sequential)
        )
        raise TypeError(
            f"a model that is checked must have a forward: got {type(model).__name__}, whose "
            "training_step alone says how its layers are called. Write --config file.yaml, to run "
            f"a batch of its data{calls}."
        )
    vars(model)["forward"] = module.__call__


def _input(sizes: str, below: int | None) -> Tensor:
    try:
        shape = (_ROWS, *map(int, sizes.split(",")))
    except ValueError:
        raise ValueError(f"--input must be {_INPUT}: got {sizes!r}.") from None
    return torch.randn(shape) if below is None else torch.randint(below, shape)


class _Listed(Callback):
    """Prints the stages once the pipeline is set up."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, GPipeStrategy) or strategy.pipeline is None:
            raise TypeError(
                "trainer.strategy must be a pipeline to be checked: got "
                f"{type(strategy).__name__}. Write strategy: gpipe in the configuration."
            )
        if trainer.is_global_zero:
            print(listing(strategy.pipeline))

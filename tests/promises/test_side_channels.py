"""Nothing silent: side channels between layers are reported in the first mini-batches.

Here are also the tests of ``shared_objects``.
"""

import logging
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.faults import OwnError
from tests.support.models import Call, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]


class Memory:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.mask: Any = None


class Writes(nn.Module):
    """Leaves something in an object."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.memory, dict):
            self.memory["mask"] = x > 0
        elif isinstance(self.memory, list):
            self.memory.append(x > 0)
        else:
            self.memory.mask = x > 0
        return x


class Reads(nn.Module):
    """Holds the object too."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("kind", [dict, list, Memory])
def test_object_that_layers_of_two_stages_share(pipe: Pipe, kind: type) -> None:
    memory = kind()
    layers = nn.Sequential(
        perceptron(2), Writes(memory), *perceptron(2), nn.Sequential(Reads(memory))
    )
    pipeline = pipe(layers, [2, 3])

    message = rf"a {kind.__name__} that is layer 1\.memory and layer 4\.0\.memory\. Stages work on"
    with pytest.warns(UserWarning, match=message), suppress(RuntimeError):
        pipeline(rows(7))  # it fails if a change comes while the other layer runs


def test_shared_object_is_told_of_if_the_forward_fails(pipe: Pipe) -> None:
    def fail(x: Tensor) -> Tensor:
        raise OwnError

    memory: dict[str, Any] = {}
    layers = nn.Sequential(Writes(memory), Call(fail), Reads(memory))

    told = pytest.warns(UserWarning, match=r"layer 0\.memory and layer 2\.memory")
    with told, pytest.raises(OwnError):
        pipe(layers, [2, 1])(rows(7))


@pytest.mark.parametrize("kind", [dict, list, Memory])
def test_object_that_is_shared_and_not_changed(pipe: Pipe, kind: type) -> None:
    settings = kind()
    layers = nn.Sequential(perceptron(2), Reads(settings), *perceptron(2), Reads(settings))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(layers, [2, 3])(rows(7)).sum().backward()


class Logs(nn.Module):
    """Asks the logger that all layers of its file have, which caches the answer."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger = logger

    def forward(self, x: Tensor) -> Tensor:
        self.logger.debug("forward")
        return x


def test_logger_that_is_shared(pipe: Pipe) -> None:
    logger = logging.Logger("a logger of its own")
    layers = nn.Sequential(perceptron(2), Logs(logger), *perceptron(2), Logs(logger))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(layers, [2, 3], copy=False)(rows(7)).sum().backward()


class Tags(nn.Module):
    """Sets an attribute on the tensor that it returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.mask = x > 0  # type: ignore[attr-defined]  # that is what it is about
        return y


def test_attribute_of_a_tensor_that_leaves_a_stage(pipe: Pipe) -> None:
    """The next stage gets a new tensor, without the attribute."""
    pipeline = pipe(nn.Sequential(perceptron(2), Tags(), *perceptron(2)), [2, 2])

    with pytest.warns(
        UserWarning, match=r"leave stage 0 .* attributes .* got 'mask', which do not"
    ):
        pipeline(rows(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(rows(7)).sum().backward()  # told once


def test_attribute_of_a_tensor_within_a_stage(pipe: Pipe) -> None:
    layers = nn.Sequential(perceptron(2), Tags(), nn.Linear(3, 3).double(), *perceptron(2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(layers, [3, 2])(torch.ones(7, 3).double())

"""Programs over GPUs: values that go straight from stage to stage, from the caller and to it."""

from __future__ import annotations

import operator
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_gpipe import whole
from lightning_gpipe.core.programs import Program, Step
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import DEVICES, ON_GPU, assert_same
from tests.support.pipes import every_mode, with_and_without_threads
from tests.support.programs import Running, call, plainly

pytestmark = ON_GPU

WIDTH = 32
INPUTS, OUTPUTS = [0, 1, 2], [9, 4, 3]


def blocks() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def steps(blocks: list[nn.Linear], n: int) -> list[Step]:
    """Every stage uses the bias, the last one uses the mask and what the first one made."""

    def at(j: int) -> int:
        return j * n // 4

    return [
        call(blocks[0], 3, at(0), 0),
        call(operator.add, 4, at(0), 3, 2),
        call(blocks[1], 5, at(1), 4),
        call(operator.add, 6, at(1), 5, 2),
        call(blocks[2], 7, at(2), 6),
        call(operator.mul, 8, at(3), 7, 1),
        call(lambda x, y, bias: blocks[3](x) + y + bias, 9, at(3), 8, 3, 2),
    ]


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("devices", DEVICES)
def test_program(mode: ActivationCheckpointing, threads: bool, devices: list[str]) -> None:
    n, plain = max(2, len(devices)), blocks()
    modules = deepcopy(plain)
    held = [[b for k, b in enumerate(modules) if k * n // 4 == j] for j in range(n)]
    running = Running(held, devices, mode=mode, threads=threads)
    program = Program(steps(modules, n), inputs=INPUTS, outputs=OUTPUTS, n=n)
    generator = torch.Generator().manual_seed(1)
    shapes = (13, WIDTH), (13, WIDTH), (WIDTH,)
    values = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    for _ in range(2):
        given = [x.clone().requires_grad_() for x in values]
        others = [x.clone().requires_grad_() for x in values]
        placed = [given[0].to(devices[0]), given[1], whole(given[2].to(devices[-1]))]

        found = running(program, placed)
        wanted = plainly(steps(plain, n), INPUTS, OUTPUTS, others)
        sum(x.square().sum() for x in found).backward()
        sum(x.square().sum() for x in wanted).backward()

        assert {str(x.device) for x in found} == {str(torch.device(devices[-1]))}
        for one, other in zip([*found, *given], [*wanted, *others], strict=True):
            assert_same(one.detach().cpu(), other.detach())
        for one, other in zip(given, others, strict=True):
            assert_same(one.grad, other.grad)
    for module, other in zip(modules, plain, strict=True):
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert_same(p.grad.cpu(), q.grad)
    running.close()

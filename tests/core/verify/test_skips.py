"""verify() of a pipeline with skip connections."""

from torch import nn

from lightning_gpipe import verify
from lightning_gpipe.core.skip.declare import in_flight
from tests.support.models import Call, rows
from tests.support.pipes import Pipe
from tests.support.skip_layers import pair


def test_skips_are_run_in_both_ways(pipe: Pipe) -> None:
    near, far = pair(), pair()
    layers = nn.Sequential(far[0], near[0], nn.Linear(3, 3), near[1], nn.Tanh(), far[1]).double()
    pipeline = pipe(layers, stages=3)

    assert verify(pipeline, rows(7)).difference is None
    assert not in_flight()


def test_fault_behind_a_skip_is_found(pipe: Pipe) -> None:
    stash, pop = pair(of=lambda x: x - x.mean(0))
    layers = nn.Sequential(nn.Linear(3, 3), stash, Call(lambda x: x.tanh()), pop).double()
    pipeline = pipe(layers)

    difference = verify(pipeline, rows(7)).difference

    assert difference is not None
    assert difference.layer == 3

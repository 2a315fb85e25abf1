"""The engine runs mini-batches, one phase after the other, and undoes what was not ended.

Here are also the tests of ``caller``, ``minibatch`` and ``minibatch_run``.
"""

from contextlib import suppress

import pytest
import torch
from torch import nn

from lightning_gpipe.core.data.pytree import tree_flatten
from lightning_gpipe.core.layout import cut, lay_out
from lightning_gpipe.core.run.engine import Engine
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import fill_drain
from lightning_gpipe.core.transport import InlineTransport, LocalTransport
from tests.support.faults import OwnError, throw
from tests.support.process import workers
from tests.support.stages import program_of
from tests.support.transports import CPU, MockTransport

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def step(engine: Engine, m: int = 3, recomputed: int = 2) -> torch.Tensor:
    microbatches = [tree_flatten(x) for x in X.chunk(m)]
    schedule = fill_drain(m, engine.layout.placement, recomputed=recomputed)
    program = program_of(engine.layout)
    outputs = torch.cat([flat.leaves[0] for flat in engine.run(microbatches, schedule, program)[0]])
    outputs.square().sum().backward()
    return outputs


def test_transport_that_is_not_threads() -> None:
    module, plain, transport = layers(), layers(), MockTransport()
    engine = Engine(lay_out(cut(module, [2, 1]), [CPU, CPU]), transport)

    outputs = step(engine)
    expected = plain(X)
    expected.square().sum().backward()

    torch.testing.assert_close(outputs, expected)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    schedule = fill_drain(3, (0, 1), recomputed=2)
    assert transport.phases == [schedule.phase(0), schedule.phase(1)]
    assert transport.performed == [*schedule.phase(0).interleaved, *schedule.phase(1).interleaved]


@pytest.fixture
def engine() -> Engine:
    layout = lay_out(cut(layers(), [2, 1]), [CPU])
    return Engine(layout, InlineTransport(layout))


def test_every_mini_batch_is_observed(engine: Engine) -> None:
    seen: list[Timeline] = []
    handle = engine.observe(seen.append)

    step(engine, m=2)
    step(engine, m=3)
    handle.remove()
    step(engine, m=1)

    assert [timeline.schedule.m for timeline in seen] == [2, 3]
    assert len(seen[0].spans) == sum(map(len, seen[0].schedule.rows))


def test_observers_do_not_see_what_is_to_be_forgotten(engine: Engine) -> None:
    seen: list[Timeline] = []
    engine.observe(seen.append)
    step(engine)
    latest = engine.timeline

    with engine.unchanged():
        step(engine)
    assert engine.timeline is latest
    assert len(seen) == 1

    step(engine)
    assert len(seen) == 2


def test_error_in_what_is_to_be_forgotten(engine: Engine) -> None:
    seen: list[Timeline] = []
    engine.observe(seen.append)
    step(engine)
    latest = engine.timeline

    with suppress(OwnError), engine.unchanged():
        step(engine)
        throw(OwnError())()
    assert engine.timeline is latest

    step(engine)
    assert len(seen) == 2


def test_layout_that_is_changed(engine: Engine) -> None:
    (weight, *_) = engine.stages[0].partition.parameters
    changed = engine.layout.with_homes({weight: torch.device("meta")})

    engine.layout = changed

    assert engine.layout is changed
    assert [engine.stages[0].followed] == [{(engine.stages[0].modules[0], "weight")}]


def test_threads_of_a_closed_engine_end_until_it_runs_again() -> None:
    layout = lay_out(cut(layers(), [2, 1]), [CPU, CPU])
    engine, others = Engine(layout, LocalTransport(layout)), workers()
    step(engine)
    own = [thread for thread in workers() if thread not in others]
    assert len(own) == 2

    engine.close()
    assert not any(thread.is_alive() for thread in own)

    step(engine)
    engine.close()

"""How often layers are searched; ``tests/promises/test_parameters_in_steps.py`` has the rest."""

from collections.abc import Iterator
from contextvars import copy_context

from torch import nn

from lightning_gpipe.core.layout import Partition
from lightning_gpipe.core.run.guards.values_on_layers import ValuesOnLayers
from tests.support.stages import stage


class Searched(list[Partition]):
    """Partitions that count how often their layers are searched."""

    searches = 0

    def __iter__(self) -> Iterator[Partition]:
        self.searches += 1
        return super().__iter__()


def test_search_in_the_first_mini_batches_only() -> None:
    stages = Searched([stage(nn.Linear(2, 2)).partition])
    values = ValuesOnLayers(stages)

    for _ in range(5):
        values.begin()
        for i in range(3):
            values.at_call(i, copy_context(), copy_context())
        values.end()

    # Before the code and at its first call, in two mini-batches; then once for their attributes.
    assert stages.searches == 2 * 2 + 1

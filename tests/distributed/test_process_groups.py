"""The process groups of a process that fails."""

from types import SimpleNamespace
from typing import Any

from lightning_gpipe.distributed.process_groups import ProcessGroups


def test_process_that_fails_awaits_no_other_failure() -> None:
    """Once each callback that saved on its error waited five seconds for the reason."""
    everyone, pipeline, none = *(SimpleNamespace(watchers=["lifeline"]) for _ in range(2)), None
    make: Any = ProcessGroups
    groups = make(everyone, pipeline, pipeline, *[none] * 5, (), (), none, none)

    groups.expect_failures()

    assert not everyone.watchers
    assert not pipeline.watchers

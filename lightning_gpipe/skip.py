"""Skip connections between layers of an nn.Sequential: stashed by one, popped by a later one.

The names are torchgpipe's: a model written for it runs once its import is changed.
"""

from lightning_gpipe.core.skip import (
    Namespace,
    isolate,
    pop,
    skippable,
    stash,
    verify_skippables,
    with_skips,
)

__all__ = ["Namespace", "isolate", "pop", "skippable", "stash", "verify_skippables", "with_skips"]

"""A flag for layers whose forward runs again."""

from __future__ import annotations

from contextvars import ContextVar

# Set in the copy of the caller's context variables in which a recomputation runs.
RECOMPUTING = ContextVar("RECOMPUTING", default=False)


def is_recomputing() -> bool:
    """Return whether the calling layer's forward runs again, to recompute dropped activations.

    Use it in a layer that must do something once for each micro-batch. The result is False in the
    first forward, in the plain module, and outside of layers.

    Example::

        def forward(self, x):
            if not is_recomputing():
                log_statistics(x)
            return self.linear(x)
    """
    return RECOMPUTING.get()

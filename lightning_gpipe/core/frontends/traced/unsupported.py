"""The error of a forward that cannot run in stages."""


class UnsupportedForward(TypeError):
    """Raised with what must hold, the user's line, and what to do."""

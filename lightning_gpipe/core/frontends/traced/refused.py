"""The error of a forward that cannot be traced."""


class Refused(TypeError):
    """A forward that cannot be traced: what must hold, the user's line, and what to do."""

"""What is taken out of the engine: data, which ``python -m tests.mutation --declaration`` prints.

A statement whose value nobody takes is there for its effect, so each is a mutant, whatever it is
called: new code is covered without a line here. The names only tell the kind of an effect, and
which calls make context managers.
"""

from __future__ import annotations

import re

# The rooms whose modules are mutated by default.
ROOMS = (
    "lightning_gpipe/core/transport",
    "lightning_gpipe/core/run",
    "lightning_gpipe/core/faithful",
)

# The kind of an effect, by the first word of the name of what is called or assigned.
KINDS = {
    "waits": "finish fetch join rejoin synchronize wait",
    "sends": "cancel notify put send start wake",
    "records": "add append find forget insert lend mark note record save settle share update watch "
    "watched warn",
    "sets": "assign begin set setattr swap",
    "rewinds": "advance manual_seed replay reset restore rewind seed",
    "undoes": "abandon clear close commit delete exit pop release remove undo",
    "checks": "check explain raise refuse",
}

# The first word of a call that makes a context manager: taken out of a ``with`` statement, and out
# of a list, a tuple or a sum that collects managers.
MANAGERS = (
    "changed drawing dropping entered exclusive replaying saving swapped training undone using"
)

# Methods of a container. On a local variable they compute a value, and are no effect.
BUILDING = "add append extend insert setdefault sort update"

# An effect on CUDA streams: only tests for GPUs can notice that it is missing.
STREAMS = re.compile(r"stream|event|cuda|lend\(|rejoin")


def kind_of(name: str) -> str:
    """The kind of an effect, by the name of what is called or assigned; "acts" if it has none."""
    word = first_word(name)
    return next((kind for kind, words in KINDS.items() if word in words.split()), "acts")


def makes_manager(name: str) -> bool:
    """Whether a function of this name makes a context manager."""
    return first_word(name) in MANAGERS.split()


def first_word(name: str) -> str:
    """The first word of an identifier: ``wait`` of ``_wait_for_all``."""
    return name.strip("_").partition("_")[0]

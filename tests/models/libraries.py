"""The libraries whose models are tried, and in which settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from tests.models.case import Case
from tests.models.settings import ALL, SOME, Setting


@dataclass(frozen=True)
class Library:
    """A library.

    Attributes:
        name: As on the package index.
        modules: The modules here that list its models.
        settings: How each is run. Convolutional networks take seconds: not every number of stages
            with every mode.
    """

    name: str
    modules: tuple[str, ...]
    settings: tuple[Setting, ...]

    @property
    def packages(self) -> list[str]:
        """The packages whose versions matter."""
        return ["torch"] if self.name == "guide" else ["torch", self.name]

    @property
    def cases(self) -> Sequence[Case]:
        """Its models; importing the library takes seconds, and is done here only."""
        return [case for module in self.modules for case in import_module(module).CASES]


_ALL = [
    Library("transformers", ("tests.models.hugging_face", "tests.models.signals"), tuple(ALL)),
    Library("peft", ("tests.models.peft_models",), tuple(SOME)),
    Library("diffusers", ("tests.models.diffusers_models",), tuple(SOME)),
    Library("torchvision", ("tests.models.torchvision_models",), tuple(SOME)),
    Library("timm", ("tests.models.timm_models",), tuple(SOME)),
    Library("guide", ("tests.models.guide",), tuple(ALL)),
]
NAMES = [each.name for each in _ALL]


def chosen(names: Sequence[str]) -> Iterator[Library]:
    """The libraries of these names; all without names.

    Raises:
        ValueError: If there is no library of a name.
    """
    if unknown := sorted(set(names) - set(NAMES)):
        raise ValueError(f"libraries are {', '.join(NAMES)}: got {unknown[0]!r}.")
    return (each for each in _ALL if not names or each.name in names)

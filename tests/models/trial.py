"""What became of a case: the same in all settings, refused as expected, or a failure."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from tests.models.case import Case
from tests.models.comparison import Comparison
from tests.models.settings import Setting


class Failure(NamedTuple):
    """A setting in which the pipeline was not the plain model, and how that showed."""

    setting: Setting
    what: str


class Trial(NamedTuple):
    """The result of a case.

    Attributes:
        case: The case.
        settings: The number of settings that were tried.
        failures: Those that failed.
        refusal: What the pipeline said if it was refused as the case expects.
    """

    case: Case
    settings: int
    failures: Sequence[Failure]
    refusal: str = ""

    @property
    def passed(self) -> bool:
        """Whether the case went as expected."""
        return not self.failures


def attempt(case: Case, settings: Sequence[Setting]) -> Trial:
    """Compare a case in each of the settings; or see it refused in the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about configurations as small as ours
        comparison = Comparison(case)
        if case.refused is not None:
            return _refused(comparison, case, case.refused, settings[0])
        tried = [(each, _tried(comparison, each)) for each in settings]
    return Trial(case, len(settings), [Failure(*each) for each in tried if each[1]])


def _tried(comparison: Comparison, setting: Setting) -> str:
    try:
        return comparison.difference(setting) or ""
    except Exception as error:  # whatever it is, the next cases are tried too
        return _shown(error)


def _refused(comparison: Comparison, case: Case, pattern: str, setting: Setting) -> Trial:
    try:
        comparison.difference(setting)
    except (TypeError, ValueError, RuntimeError) as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if re.search(pattern, message):
            return Trial(case, 1, [], message)
        return Trial(case, 1, [Failure(setting, _shown(error))])
    return Trial(case, 1, [Failure(setting, f"is not refused with {pattern!r}")])


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))

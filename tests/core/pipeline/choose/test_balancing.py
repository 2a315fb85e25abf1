"""A balance by the names of the modules where stages begin."""

import pytest

from lightning_gpipe.core.pipeline.choose.balancing import counts_between

UNITS = ["stem", "down.0.conv", "down.0.norm", "down.1.conv", "up", "head"]


def test_stages_begin_at_the_first_unit_within_the_named_modules() -> None:
    assert counts_between(["down.1", "up"], UNITS, "net", "") == [3, 1, 2]
    assert counts_between(["down"], UNITS, "net", "") == [1, 5]


def test_names_from_what_is_cut() -> None:
    units = [f"net.{unit}" for unit in UNITS]

    assert counts_between(["down.1", "net.up"], units, "Model.net", "net") == [3, 1, 2]


def test_first_unit_may_be_named() -> None:
    assert counts_between(["stem", "up"], UNITS, "net", "") == [4, 2]


def test_name_that_is_the_beginning_of_another() -> None:
    with pytest.raises(ValueError, match="got 'dow', and no unit of net .* units are 'stem', "):
        counts_between(["dow"], UNITS, "net", "")


def test_names_that_are_not_in_order() -> None:
    with pytest.raises(ValueError, match=r"in their order: got \['up', 'stem'\]"):
        counts_between(["up", "stem"], UNITS, "net", "")

"""Draws from the generators of libraries are looked for more and more seldom in each mode."""

from __future__ import annotations

from lightning_gpipe.core.faithful.random.library_watch import LibraryDraws

TRAIN = bytes([True])


def forward(draws: LibraryDraws, flags: bytes) -> None:
    draws.begin(flags, alone=True, recomputed=True).end()


def test_states_are_saved_in_the_first_mini_batch_of_a_mode() -> None:
    draws = LibraryDraws()
    for _ in range(2):
        assert draws.saved(TRAIN)
        forward(draws, TRAIN)
    assert not draws.saved(TRAIN)
    assert draws.saved(bytes([False]))


def test_many_modes_do_not_add_up() -> None:
    draws = LibraryDraws()
    forward(draws, TRAIN)
    forward(draws, TRAIN)
    for k in range(100):
        forward(draws, bytes(k >> bit & 1 for bit in range(7)))
    assert draws.saved(TRAIN), "forgotten among so many others, and so looked at again"

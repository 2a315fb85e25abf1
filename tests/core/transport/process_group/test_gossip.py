"""What a process hears several times, it passes on once; and again only what is earlier."""

from lightning_gpipe.core.transport.process_group.gossip import Gossip


def test_only_what_is_earlier_than_all_before_is_news() -> None:
    gossip = Gossip()

    assert [gossip.is_news("run 0", at) for at in (7, 7, 4, 7, 5)] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert gossip.is_news("run 1", 7)


def test_what_has_no_time_is_news_once() -> None:
    gossip = Gossip()

    assert [gossip.is_news("loss") for _ in range(3)] == [True, False, False]

"""Every tree of a small size connects all processes, and none of them has too many neighbours."""

import pytest

from lightning_gpipe.core.transport.process_group.tree import FAN_OUT, Tree


@pytest.mark.parametrize("fan_out", [2, 3, 8])
@pytest.mark.parametrize("size", range(1, 20))
def test_each_process_but_the_root_is_the_child_of_its_parent(size: int, fan_out: int) -> None:
    for root in range(size):
        tree = Tree(size, root, fan_out)
        children = [(rank, child) for rank in range(size) for child in tree.children(rank)]

        assert sorted(child for _, child in children) == [k for k in range(size) if k != root]
        assert all(tree.parent(child) == rank for rank, child in children)
        assert tree.parent(root) is None
        assert all(len(tree.children(rank)) <= fan_out for rank in range(size))


@pytest.mark.parametrize("fan_out", [2, 3, 8])
@pytest.mark.parametrize("size", range(2, 20))
def test_hops_lead_to_every_process(size: int, fan_out: int) -> None:
    for root in range(size):
        tree = Tree(size, root, fan_out)
        for rank in range(size):
            for to in {*range(size)} - {rank}:
                at, hops = rank, 0
                while at != to:
                    hop = tree.next_hop(at, to)
                    assert hop in tree.neighbours(at)
                    at, hops = hop, hops + 1
                assert hops <= 2 * tree.depth


def test_up_to_nine_processes_are_a_star() -> None:
    assert [Tree(size).depth for size in (1, 2, 9, 10, 73, 74, 1024)] == [0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("size", [16, 256, 1024])
def test_inner_processes_of_the_tree_of_the_last_one_are_leaves_of_that_of_the_first(
    size: int,
) -> None:
    first, last = Tree(size), Tree(size, size - 1)

    for rank in range(size):
        near = {*first.neighbours(rank), *last.neighbours(rank)}
        assert len(near) <= FAN_OUT + 2

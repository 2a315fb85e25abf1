"""No hang: if one process fails, all pipelines of the model fail, and can continue."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.faults import Fuse, OwnError, nothing, throw
from tests.support.models import rows
from tests.support.processes import layers, said
from tests.support.ranks import Pool, group_of

Act = Callable[[], None]


class Two(nn.Module):
    """Two nn.Sequentials, and code of the user's around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()
        self.faults: dict[str, Act] = {}
        self.turned = False  # whether the second comes first

    def forward(self, x: Tensor) -> Tensor:
        one, two = (self.second, self.first) if self.turned else (self.first, self.second)
        self.come_to("before")
        x = one(x)
        self.come_to("between")
        y: Tensor = two(x.tanh())
        self.come_to("after")
        return y

    def come_to(self, place: str) -> None:
        if place in self.faults:
            self.faults.pop(place)()


def pipeline_of(model: nn.Module) -> GPipe:
    return GPipe(
        model,
        [[1, 1, 1]] * 2,
        module=["first", "second"],
        devices=["cpu"] * 3,
        chunks=2,
        owners=[0, 1, 2],
        group=group_of(3),
        activation_checkpointing="always",
    )


def loss_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    loss = model(rows(8)).square().mean()
    loss.backward()
    return loss.detach()


def fail_around(place: str, rank: int) -> tuple[str, list[Tensor]]:
    """What a step says in which the model's own code fails in one process; the next two losses."""
    model = Two()
    pipeline = pipeline_of(model)
    loss_of(pipeline)
    if dist.get_rank() == rank:
        model.faults[place] = throw(OwnError("of the model"))
    message = said(lambda: loss_of(pipeline))
    losses = [loss_of(pipeline) for _ in range(2)]
    pipeline.close()
    return message, losses


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_in_the_models_own_code(four_ranks: Pool, place: str, rank: int) -> None:
    expected = loss_of(Two())

    for k, (message, losses) in enumerate(four_ranks.run(fail_around, place, rank, among=3)):
        if k == rank:
            assert message == "OwnError | of the model"
        else:
            told = f"RankFailed | rank {rank} (stage {rank}) failed: OwnError: of the model"
            assert message.startswith(told)
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def fail_inside(name: str, kind: str, rank: int) -> tuple[str, list[Tensor]]:
    """What a step says in which a layer fails; the next two losses."""
    model = Two()
    pipeline = pipeline_of(model)
    fuses = [each for each in model.get_submodule(name).modules() if isinstance(each, Fuse)]
    fuses[rank].light((kind, 1), throw(OwnError("burnt")))
    message = said(lambda: loss_of(pipeline))
    losses = [loss_of(pipeline) for _ in range(2)]
    pipeline.close()
    return message, losses


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 2])
def test_error_in_a_layer(four_ranks: Pool, name: str, kind: str, rank: int) -> None:
    expected = loss_of(Two())

    found = four_ranks.run(fail_inside, name, kind, rank, among=3)

    for k, (message, losses) in enumerate(found):
        start = "OwnError | " if k == rank else f"RankFailed | rank {rank} (stage {rank}) failed: "
        assert message.startswith(start)
        assert "burnt" in message
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def turn(rank: int) -> tuple[str, list[Tensor]]:
    """What a step says in which one process takes the pipelines in another order; the next loss."""
    model = Two()
    pipeline = pipeline_of(model)
    model.turned = dist.get_rank() == rank
    message = said(lambda: loss_of(pipeline))
    model.turned = False
    losses = [loss_of(pipeline)]
    pipeline.close()
    return message, losses


def test_other_order_in_one_process(four_ranks: Pool) -> None:
    expected = loss_of(Two())

    for message, (loss,) in four_ranks.run(turn, 1, among=3):
        assert "all processes of a pipeline must run the same mini-batches" in message
        assert "rank 1 (stage 1)" in message
        assert "(Two.first)" in message
        assert "(Two.second)" in message
        torch.testing.assert_close(loss, expected)


def catch(rank: int) -> tuple[str, list[Tensor]]:
    """What a process says that turns the error into one of its own; the next two losses."""
    model = Two()
    pipeline = pipeline_of(model)

    def wrapped() -> Tensor:
        try:
            return loss_of(pipeline)
        except OwnError as error:
            try:
                raise ValueError("wrapped") from error
            except ValueError as other:
                pipeline.tell(other)
                raise

    if dist.get_rank() == rank:
        model.faults["between"] = throw(OwnError("of the model"))
    message = said(wrapped)
    losses = [loss_of(pipeline) for _ in range(2)]
    pipeline.close()
    return message, losses


def test_error_that_is_raised_again_as_another_is_told_once(four_ranks: Pool) -> None:
    expected = loss_of(Two())

    found = four_ranks.run(catch, 1, among=3)

    assert [message.partition(" | ")[0] for message, _ in found] == [
        "RankFailed",
        "ValueError",
        "RankFailed",
    ]
    for _, losses in found:
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def made_one_by_one(fails: str, rank: int) -> tuple[str, list[Tensor]]:
    """What a step says with two GPipes, in which one process fails; the next two losses."""
    torch.manual_seed(0)
    modules = layers(), layers()
    one, two = (
        GPipe(
            module,
            [1, 1, 1],
            devices=["cpu"] * 3,
            chunks=2,
            owners=[0, 1, 2],
            group=group_of(3),
        )
        for module in modules
    )
    fault: dict[str, Act] = {}
    if fails == "layer":
        fuses = [each for each in modules[1].modules() if isinstance(each, Fuse)]
        fuses[rank].light(("forward", 1), throw(OwnError("burnt")))
    elif dist.get_rank() == rank:
        fault["between"] = throw(OwnError("burnt"))

    def both(x: Tensor) -> Tensor:
        x = one(x)
        try:
            fault.pop("between", nothing)()
        except OwnError as error:
            one.tell(error)
            raise
        y: Tensor = two(x.tanh())
        return y

    message = said(lambda: loss_of(both))
    losses = [loss_of(both) for _ in range(2)]
    one.close()
    two.close()
    return message, losses


@pytest.mark.parametrize("fails", ["layer", "caller"])
@pytest.mark.parametrize("rank", [0, 1])
def test_pipelines_that_were_made_one_by_one(four_ranks: Pool, fails: str, rank: int) -> None:
    expected = loss_of(Two())

    found = four_ranks.run(made_one_by_one, fails, rank, among=3)

    for k, (message, losses) in enumerate(found):
        start = "OwnError | " if k == rank else f"RankFailed | rank {rank} (stage {rank}) failed: "
        assert message.startswith(start)
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def made_where_one_has_freed_the_first() -> list[Tensor]:
    """Losses of a pipeline that is made while only some processes have an earlier one."""
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "owners": [0, 1, 2], "group": group_of(3)}
    first = GPipe(layers(), [1, 1, 1], **options)
    found = [loss_of(first)]
    first.close()  # in all, so that none waits for the others
    if dist.get_rank() == 1:
        del first
        gc.collect()
    second = GPipe(layers(), [1, 1, 1], **options)
    third = GPipe(layers(), [1, 1, 1], **options)
    found += [loss_of(second), loss_of(third), loss_of(second)]
    second.close()
    third.close()
    return found


def test_pipeline_that_is_made_where_one_process_has_freed_an_earlier_one(four_ranks: Pool) -> None:
    expected = loss_of(layers()).expand(4)

    for losses in four_ranks.run(made_where_one_has_freed_the_first, among=3):
        torch.testing.assert_close(torch.stack(losses), expected)

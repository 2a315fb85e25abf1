import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful.state.behavior import Behavior
from lightning_gpipe.core.faithful.state.inplace import MutationGuard
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, assert_same, assert_same_step, rows, step
from tests.support.pipes import MODES

X = torch.arange(6.0).reshape(2, 3)


def test_copies_of_one_tensor_are_one_tensor() -> None:
    guard = MutationGuard(Behavior(), [X, X[:, :], X[:1], "name"], marked=False)

    assert guard.leaves[0] is guard.leaves[1]
    assert guard.leaves[0] is not guard.leaves[2]
    assert guard.leaves[0] is not X
    assert guard.leaves[3] == "name"


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
def test_what_is_not_edited_is_not_copied_again(inference: bool) -> None:
    behavior = Behavior()
    leaves = [X, X[:, :]]

    with torch.inference_mode(inference):
        MutationGuard(behavior, leaves, marked=False).close()
        guard = MutationGuard(behavior, leaves, marked=False)

    assert all(map(lambda a, b: a is b, guard.leaves, leaves))


def edit_first(both: tuple[Tensor, Tensor]) -> Tensor:
    return torch.relu_(both[0]) + both[1]


def edit_second(both: tuple[Tensor, Tensor]) -> Tensor:
    return both[0] * both[1].mul_(2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", [edit_first, edit_second])
@pytest.mark.parametrize(
    "twice", [lambda x: (x, x), lambda x: (x, x[:, :]), lambda x: (x.view_as(x), x)]
)
def test_one_tensor_twice_and_edited(mode: ActivationCheckpointing, edit: Any, twice: Any) -> None:
    """Once only one of the two was copied and edited, so outputs and gradients were wrong."""
    torch.manual_seed(4)
    ends = [nn.Linear(3, 3), Call(lambda x: twice(x * 1)), Call(edit), nn.Linear(3, 3)]
    plain = nn.Sequential(*ends).double()
    pipeline = GPipe(
        nn.Sequential(*plain),
        [2, 2],
        devices=["cpu", "cpu"],
        chunks=3,
        activation_checkpointing=mode,
    )

    for seed in range(3):
        plain.zero_grad()
        expected = step(plain, rows(7, seed=seed))._asdict()
        expected["gradients"] = {k: v.clone() for k, v in expected["gradients"].items()}
        plain.zero_grad()
        assert_same(step(pipeline, rows(7, seed=seed))._asdict(), expected)
    pipeline.close()


@pytest.mark.parametrize("mode", MODES)
def test_one_tensor_twice_in_the_batch_and_edited(mode: ActivationCheckpointing) -> None:
    plain = nn.Sequential(Call(lambda b: torch.relu_(b["a"]) + b["b"]), nn.Linear(3, 3)).double()
    pipeline = GPipe(plain, [1, 1], devices=["cpu", "cpu"], chunks=3, activation_checkpointing=mode)

    for _ in range(2):
        x = rows(7).detach()
        found = pipeline({"a": x, "b": x})
        x = rows(7).detach()
        assert_same(found, plain({"a": x, "b": x}))
    pipeline.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draws", [nn.Identity(), nn.Dropout(1e-9)], ids=["plain", "draws"])
def test_input_that_is_edited_in_a_list_of_tensors(
    mode: ActivationCheckpointing, draws: nn.Module
) -> None:
    """Gradients were those of inputs edited twice, as such edits were not counted."""

    def double(x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_mul_([x], 2)
        return x * x

    plain = nn.Sequential(nn.Linear(3, 3), draws, Call(double), nn.Linear(3, 3)).double()
    pipeline = GPipe(
        copy.deepcopy(plain),
        [2, 2],
        devices=["cpu", "cpu"],
        chunks=3,
        activation_checkpointing=mode,
    )

    for _ in range(2):
        assert_same_step(pipeline, plain, rows(7))
    pipeline.close()


def test_edit_of_a_tensor_of_which_another_is_a_part_is_refused() -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, 1:]

    module = nn.Sequential(nn.Linear(3, 3), Call(parts), Call(lambda b: b[0].mul_(2)), nn.Tanh())
    pipeline = GPipe(module, [2, 2], devices=["cpu"])

    with pytest.raises(RuntimeError, match="layer 2 .Call. must not edit an input that"):
        pipeline(torch.ones(4, 3))


@pytest.mark.parametrize("mode", MODES)
def test_edit_beside_another_part_of_the_same_memory(mode: ActivationCheckpointing) -> None:
    plain = nn.Sequential(
        nn.Linear(3, 4),
        Call(lambda x: (x[:, :2], x[:, 2:])),
        Call(lambda b: torch.relu_(b[0].clone()) + b[1].mul(2)),
        Call(lambda x: x.add_(1)),
    ).double()
    pipeline = GPipe(plain, [2, 2], devices=["cpu"], chunks=3, activation_checkpointing=mode)

    expected = plain(rows(7))

    assert_same(pipeline(rows(7)), expected)

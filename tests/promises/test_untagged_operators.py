"""Nothing silent: a layer that draws by operators without the tag is reported."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.library import Library

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, assert_same_step, rows, step
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = [pytest.mark.usefixtures("own_generator"), with_and_without_threads]

W = 3


@pytest.fixture
def library() -> Iterator[Library]:
    """Operators that multiply by random numbers, tagged and untagged, and one that does not."""
    library = Library("gpipe_tests", "DEF")
    library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.define("untagged(Tensor x) -> Tensor")
    library.define("doubled(Tensor x) -> Tensor")
    for name in ("tagged", "untagged"):
        library.impl(
            name, lambda x: x * torch.rand(x.shape, dtype=x.dtype), "CompositeExplicitAutograd"
        )
    library.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
    yield library
    library._destroy()


def times(name: str) -> nn.Module:
    """A layer that multiplies by what an operator makes of ones."""
    operator = getattr(torch.ops.gpipe_tests, name)
    return Call(lambda x: x * operator(torch.ones_like(x)))


def model(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(W, W).double(), nn.Tanh(), *layers)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("mode", ["always", "except_last", 1])
def test_untagged_operator_in_a_layer_that_is_recomputed(
    mode: ActivationCheckpointing, pipe: Pipe
) -> None:
    """Once the output was right, and the gradient that of other numbers."""
    pipeline = pipe(model(times("untagged")), mode=mode)

    with pytest.raises(RuntimeError, match=r"got gpipe_tests::untagged, untagged.*never"):
        step(pipeline, rows(7))


@pytest.mark.usefixtures("library")
def test_untagged_operator_that_starts_to_draw_later(pipe: Pipe) -> None:
    layer = times("doubled")
    pipeline = pipe(model(layer), copy=False)
    step(pipeline, rows(7))
    layer.forward = times("untagged").forward

    with pytest.raises(RuntimeError, match=r"got gpipe_tests::untagged, untagged"):
        step(pipeline, rows(7))


@pytest.mark.usefixtures("library")
def test_untagged_operator_in_layers_that_are_not_recomputed(pipe: Pipe) -> None:
    """The gradient is right, but the numbers depend on the timing of threads."""
    plain = nn.Sequential(nn.Linear(W, W).double(), times("untagged"))
    pipeline = pipe(plain, mode="never")
    before = torch.get_rng_state()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            step(pipeline, rows(7))

    assert ["tagged with torch.Tag.nondeterministic_seeded" in str(w.message) for w in found] == [
        True
    ]
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("library")
def test_untagged_operator_without_gradients(pipe: Pipe) -> None:
    pipeline = pipe(model(times("untagged")))

    with torch.no_grad(), pytest.warns(UserWarning, match=r"torch.Tag.nondeterministic_seeded"):
        pipeline(rows(7))


@pytest.mark.usefixtures("library")
@every_mode
def test_tagged_operator_draws_the_same_again(pipe: Pipe) -> None:
    steps = []
    for mode in (None, "never"):
        torch.manual_seed(3)
        steps.append(step(pipe(model(times("tagged")), copy=True, mode=mode), rows(7)))

    assert torch.equal(steps[0].output, steps[1].output)


@pytest.mark.usefixtures("library")
@every_mode
def test_custom_operator_that_draws_nothing(pipe: Pipe) -> None:
    plain = model(times("doubled"), nn.Linear(W, W).double(), times("doubled"))
    pipeline = pipe(plain)

    assert_same_step(pipeline, plain, rows(7))


@every_mode
def test_layer_that_seeds_the_generator(pipe: Pipe) -> None:
    """Once its seed was ignored."""

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x * torch.rand_like(x)

    pipeline = pipe(model(Call(seeded)))

    with pytest.warns(UserWarning, match="must not seed a generator"):
        pipeline(rows(7))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("mode", ["always", "never"])
def test_lone_worker_may_draw_as_it_likes(mode: ActivationCheckpointing, pipe: Pipe) -> None:
    plain = model(times("untagged"))
    pipeline = pipe(plain, devices=1, chunks=1, mode=mode)

    found = []
    for module in (plain, pipeline):
        torch.manual_seed(3)
        found.append(step(module, rows(7)))

    torch.testing.assert_close(found[1], found[0])


@pytest.mark.usefixtures("library")
def test_untagged_operator_in_backward(pipe: Pipe) -> None:
    def noisy(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient + torch.ops.gpipe_tests.untagged(gradient))
        return y

    pipeline = pipe(model(Call(noisy)), mode="never")
    before = torch.get_rng_state()

    with pytest.warns(UserWarning, match=r"torch.Tag.nondeterministic_seeded"):
        step(pipeline, rows(7))

    assert not torch.equal(torch.get_rng_state(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(pipeline, rows(7))

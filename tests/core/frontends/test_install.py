import copy
import io

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.install import InstalledForward, install
from lightning_gpipe.core.pipeline import GPipe
from tests.support.pipes import Pipe


class Body(nn.Sequential):
    def width(self) -> int:
        return 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def pipeline(model: Model, pipe: Pipe) -> GPipe:
    pipeline = pipe(model.body, [2, 1], chunks=2, copy=False)
    install(model.body, pipeline.forward)
    return pipeline


@pytest.fixture
def installed(model: Model, pipeline: GPipe) -> InstalledForward:
    found = model.body.forward
    assert isinstance(found, InstalledForward)
    return found


X = torch.linspace(-1, 1, 8).reshape(4, 2)


def test_module_runs_as_the_pipeline(model: Model, pipeline: GPipe) -> None:
    expected = copy.deepcopy(model)(X)

    y = model(X)

    torch.testing.assert_close(y, expected)
    assert pipeline.timeline is not None


def test_module_stays_what_it_was(model: Model, pipeline: GPipe) -> None:
    assert type(model.body) is Body
    assert model.body.width() == 2
    names = [f"body.{k}.{name}" for k in (0, 2) for name in ("weight", "bias")]
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == ["", "body", "body.0", "body.1", "body.2"]


def test_hooks_of_the_module_run_once_with_the_whole_mini_batch(
    model: Model, pipeline: GPipe
) -> None:
    seen: list[tuple[int, ...]] = []
    model.body.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model.body.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))

    model(X)

    assert seen == [(4, 2), (4, 2)]


def test_deep_copy_runs_as_the_plain_module(model: Model, pipeline: GPipe) -> None:
    model(X)

    twin = copy.deepcopy(model)
    pipeline.engine.timeline = None
    twin.get_parameter("body.0.weight").data.zero_()

    assert twin(X).shape == (4, 2)
    assert pipeline.timeline is None
    assert not torch.equal(twin(X), model(X))


def test_copy_can_be_made_a_pipeline_of_its_own(model: Model, pipeline: GPipe, pipe: Pipe) -> None:
    twin = copy.deepcopy(model)
    own = pipe(twin.body, [1, 2], copy=False)
    install(twin.body, own.forward)

    torch.testing.assert_close(twin(X), model(X))
    assert own.timeline is not None


def test_removed_pipeline_leaves_the_plain_module(
    model: Model, pipeline: GPipe, installed: InstalledForward
) -> None:
    installed.remove()
    installed.remove()

    model(X)

    assert pipeline.timeline is None
    assert vars(model.body).keys() == vars(Model().body).keys()


def test_second_pipeline_of_a_module(model: Model, pipeline: GPipe) -> None:
    with pytest.raises(RuntimeError, match="one pipeline at a time: Model.body is in another one"):
        install(model.body, pipeline.forward, "Model.body")


def test_removing_leaves_what_was_installed_later(
    model: Model, pipeline: GPipe, installed: InstalledForward
) -> None:
    installed.remove()
    later = install(model.body, pipeline.forward)

    installed.remove()

    model(X)
    assert vars(model.body)["forward"] is later
    assert pipeline.timeline is not None


def test_saved_module_runs_as_the_plain_module(model: Model, pipeline: GPipe) -> None:
    """Once a bound method of a class that cannot be pickled ran it, so torch.save failed."""
    expected = model(X)
    file = io.BytesIO()

    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    pipeline.engine.timeline = None

    torch.testing.assert_close(twin(X), expected)
    assert pipeline.timeline is None

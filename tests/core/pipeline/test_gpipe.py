"""Reported: a GPipe refuses bad arguments, and lists its stages and its timeline.

Here are also the tests of ``pipeline/pipeline`` and ``sequential``.
"""

import copy
import gc
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.schedules import ActivationCheckpointing, Kind
from tests.support.models import assert_same, perceptron, rows, step
from tests.support.pipes import RECOMPUTED, Pipe, every_mode
from tests.support.process import workers

CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Sequential:
    return perceptron(4)


@pytest.fixture
def pipeline(module: nn.Sequential, pipe: Pipe) -> GPipe:
    return pipe(module, copy=False)


class Where(nn.Module):
    """Remembers the threads that ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread())
        return x * 1


# Bad input: the messages themselves belong to the modules that check.


@pytest.mark.parametrize(
    "arguments, error, found",
    [
        ({"balance": [2, 1]}, ValueError, "balance=[2, 1] (sum 3) for the 4 layers"),
        ({"balance": [4, 0]}, ValueError, "balance=[4, 0]"),
        ({"balance": [5, -1]}, ValueError, "balance=[5, -1]"),
        ({"balance": []}, ValueError, "balance=[]"),
        ({"balance": [2.0, 2]}, TypeError, "balance=[2.0, 2] (types float, int)"),
        ({"balance": [1] * 5}, ValueError, "got 5 stages for the 4 layers"),
        (
            {"chunks": 0},
            ValueError,
            "chunks must be at least 1, the number of micro-batches: got 0",
        ),
        ({"chunks": -3}, ValueError, "got -3"),
        ({"chunks": 2.0}, TypeError, "chunks must be an integer"),
        ({"chunks": True}, TypeError, "got True"),
        ({"activation_checkpointing": "sometimes"}, ValueError, "got 'sometimes'"),
        ({"activation_checkpointing": -1}, ValueError, "got -1"),
        ({"activation_checkpointing": 0.5}, TypeError, "got 0.5"),
        ({"devices": ["cpu"] * 3}, ValueError, "3 devices. The devices are ['cpu', 'cpu', 'cpu']"),
        ({"devices": ["cpu"] * 4}, ValueError, "got 2 stages for 4 devices"),
        ({"balance": 2}, TypeError, "balance must be a list of ints"),
        ({"devices": 2}, TypeError, "devices must be a list of devices, or None: got 2"),
        ({"devices": "cpu"}, TypeError, "devices must be a list of devices, or None: got 'cpu'"),
        ({"devices": []}, ValueError, "got 2 stages for 0 devices. The devices are []"),
    ],
    ids=str,
)
def test_bad_argument(
    module: nn.Sequential, arguments: dict[str, Any], error: type[Exception], found: str
) -> None:
    with pytest.raises(error) as caught:
        GPipe(module, **{"balance": [2, 2], "devices": ["cpu"] * 2, **arguments})

    assert found in str(caught.value)


@pytest.mark.parametrize("balance", [[2, 1], [4, 4]])
@pytest.mark.parametrize("option", [{"chunks": "auto"}, {"activation_checkpointing": "auto"}])
def test_balance_that_a_plan_cannot_count(
    module: nn.Sequential, balance: list[int], option: dict[str, Any]
) -> None:
    """The planner ended in an IndexError."""
    arguments: dict[str, Any] = {"chunks": 2, "sample": torch.randn(8, 2), **option}
    with pytest.raises(ValueError, match="must add up to the number of layers.*for the 4 layers"):
        GPipe(module, balance, devices=["cpu"] * 2, **arguments)


def test_module_that_is_one_layer() -> None:
    with pytest.raises(TypeError, match="Linear must call modules in its forward.*: got none"):
        GPipe(nn.Linear(2, 2), [1])


@pytest.mark.parametrize("module", [None, [nn.Linear(2, 2)]])
def test_no_module(module: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a module: got {type(module).__name__}"):
        GPipe(module, [1])


def test_same_layer_twice() -> None:
    layer = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="Linear at 0 and 1"):
        GPipe(nn.Sequential(layer, layer), [1, 1])


def test_buffer_shared_across_devices() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].running_var = module[0].running_var

    with pytest.raises(ValueError, match="layer 0.running_var .cpu. is layer 1.running_var .meta."):
        GPipe(module, [1, 1], devices=["cpu", "meta"])


class Ghost(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_batch_norm_that_cannot_be_deferred() -> None:
    module = nn.Sequential(Ghost(2))

    with pytest.raises(ValueError, match="got Ghost in layer 0"):
        GPipe(module, [1])
    GPipe(module, [1], devices=["cpu"], deferred_batch_norm=False)


def test_batch_whose_tensors_disagree(pipeline: GPipe) -> None:
    with pytest.raises(ValueError, match=r"input\[0\] of shape \(4, 3\), input\[1\] of shape \(2,"):
        pipeline((rows(4), rows(2)))


def test_batch_without_a_tensor(pipeline: GPipe) -> None:
    with pytest.raises(ValueError, match="got no tensor in list"):
        pipeline(["text"])


def test_several_arguments(pipeline: GPipe) -> None:
    """The error was Python's, of a private method."""
    with pytest.raises(TypeError, match="called with one argument, as any nn.Sequential: got 2"):
        pipeline(torch.ones(4, 4), torch.ones(4, 4))


def test_parameter_that_was_moved_after_setup(pipeline: GPipe) -> None:
    pipeline[2].to("meta")

    with pytest.raises(RuntimeError, match=r"of stage 1 \(layers 2..3, cpu\) must stay on cpu"):
        pipeline(rows(4))


# Devices.


def test_devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert GPipe(perceptron(4), [1, 1, 2]).devices == [CPU] * 3


def test_fewer_devices_than_stages(pipe: Pipe) -> None:
    layers = [Where() for _ in range(4)]
    pipeline = pipe(nn.Sequential(*layers), stages=4, devices=2, copy=False)

    pipeline(rows(4))

    assert [len(layer.threads) for layer in layers] == [1, 1, 1, 1]
    assert layers[0].threads == layers[2].threads
    assert layers[1].threads == layers[3].threads
    assert layers[0].threads != layers[1].threads


@pytest.mark.parametrize("arguments", [{"devices": 1}, {"threads": False}], ids=str)
def test_runs_on_the_calling_thread(arguments: dict[str, Any], pipe: Pipe) -> None:
    where = Where()
    module = nn.Sequential(nn.Linear(3, 3).double(), where)
    pipeline = pipe(module, copy=False, **arguments)
    before = threading.enumerate()

    step(pipeline, rows(7))

    assert where.threads == {threading.current_thread()}
    assert set(threading.enumerate()) <= set(before)  # one of another test may have ended


# The module.


def test_state_dict_loads_both_ways(pipeline: GPipe) -> None:
    plain = perceptron(4)

    plain.load_state_dict(pipeline.state_dict())
    assert_same(plain(rows(4)), pipeline(rows(4)))

    plain.get_parameter("0.weight").data.mul_(2)
    pipeline.load_state_dict(plain.state_dict())
    assert_same(plain(rows(4)), pipeline(rows(4)))


def test_layers_stay_the_users(module: nn.Sequential, pipeline: GPipe) -> None:
    assert list(pipeline) == list(module)
    assert len(pipeline) == 4
    assert pipeline[1] is module[1]
    assert pipeline[-1] is module[-1]
    assert [name for name, _ in pipeline.named_children()] == ["0", "1", "2", "3"]


def test_names_of_layers_stay() -> None:
    module = nn.Sequential()
    module.add_module("encode", nn.Linear(2, 2))
    module.add_module("decode", nn.Linear(2, 2))

    keys = GPipe(module, [1, 1], devices=["cpu"]).state_dict().keys()

    assert keys == {"encode.weight", "encode.bias", "decode.weight", "decode.bias"}


def test_training_mode_reaches_the_layers(pipeline: GPipe) -> None:
    assert not any(layer.training for layer in pipeline.eval())
    assert all(layer.training for layer in pipeline.train())


def test_repr_tells_how_it_was_made(pipeline: GPipe) -> None:
    assert repr(pipeline).startswith(
        "GPipe(\n  balance=[2, 2], devices=['cpu', 'cpu'], chunks=3, "
        "activation_checkpointing='except_last', microbatching=Rows(at_least=1)\n  (0): Linear("
    )


def test_listing(pipeline: GPipe) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(pipeline.listing())

    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "0..1" in text
    assert "2..3" in text
    assert text.count("Linear, Tanh") == 2
    assert text.count("50.0%") == 2


def deep(pipeline: GPipe) -> GPipe:
    return copy.deepcopy(pipeline)


def saved(pipeline: GPipe) -> GPipe:
    file = io.BytesIO()
    torch.save(pipeline, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [deep, saved])
def test_copy_of_a_pipeline_in_use(pipeline: GPipe, copied: Any) -> None:
    before = step(pipeline, rows(7))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of copied TreeSpecs
        twin = copied(pipeline)
    assert twin.timeline is None
    twin.zero_grad()
    pipeline.zero_grad()

    assert_same(step(twin, rows(7))._asdict(), before._asdict())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in pipeline.parameters()}
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    twin.close()


@pytest.mark.parametrize("copied", [deep, saved])
def test_copy_has_threads_of_its_own_and_no_observers(
    module: nn.Sequential, pipe: Pipe, copied: Any
) -> None:
    pipeline, others, seen = pipe(module, threads=True), workers(), list[Timeline]()
    pipeline(rows(7))
    assert len(workers()) == len(others) + 2
    pipeline.observe(seen.append)

    twin = copied(pipeline)

    assert len(workers()) == len(others) + 2
    twin(rows(7))
    assert len(workers()) == len(others) + 4
    assert not seen
    twin.close()
    assert len(workers()) == len(others) + 2


# What ran when.


def test_no_timeline_before_the_first_mini_batch(pipeline: GPipe) -> None:
    assert pipeline.timeline is None


@every_mode
def test_timeline_after_forward_and_after_backward(
    mode: ActivationCheckpointing, pipeline: GPipe
) -> None:
    loss = pipeline(rows(7)).sum()
    timeline = pipeline.timeline
    assert timeline is not None
    assert [span.action.kind for span in timeline.spans] == [Kind.FORWARD] * 6
    loss.backward()

    assert {span.action for span in timeline.spans} == {
        action for row in timeline.schedule.rows for action in row
    }
    assert len(timeline.spans) == 2 * (3 + RECOMPUTED[mode] + 3)
    assert 0 <= timeline.bubble < 1


def test_timeline_follows_the_schedule(pipeline: GPipe) -> None:
    pipeline(rows(7)).sum().backward()

    timeline = pipeline.timeline
    assert timeline is not None
    for w, row in enumerate(timeline.schedule.rows):
        assert [span.action for span in timeline.spans if span.worker == w] == list(row)


def test_small_batch_makes_fewer_micro_batches(pipeline: GPipe) -> None:
    pipeline(rows(2))

    assert pipeline.timeline is not None
    assert pipeline.timeline.schedule.m == 2


# What belongs to the caller's thread.


def test_layer_replaced_after_setup(pipeline: GPipe, module: nn.Sequential) -> None:
    module[2] = nn.Linear(3, 3)

    with pytest.raises(RuntimeError, match="layer '2' was Linear .* is another Linear now"):
        pipeline(rows(4))


def test_layer_appended_after_setup(pipeline: GPipe, module: nn.Sequential) -> None:
    module.append(nn.ReLU())

    with pytest.raises(RuntimeError, match="it was set up for 4 and has 5 now"):
        pipeline(rows(7))


def test_cached_parametrizations_are_refused(pipeline: GPipe) -> None:
    with (
        nn.utils.parametrize.cached(),
        pytest.raises(RuntimeError, match="must not run inside of .*cached"),
    ):
        pipeline(rows(7))


def test_cpu_with_an_index(pipe: Pipe) -> None:
    pipeline = pipe(perceptron(4), devices=["cpu:0", "cpu:0"])

    step(pipeline, rows(4))

    assert pipeline.devices == [CPU, CPU]


def test_slice_is_a_plain_sequential(module: nn.Sequential, pipeline: GPipe) -> None:
    part = pipeline[1:3]

    assert isinstance(part, nn.Sequential)
    assert list(part) == list(module)[1:3]


def jvp(pipeline: GPipe) -> None:
    torch.func.jvp(pipeline, (rows(4).detach(),), (torch.ones(4, 3, dtype=torch.float64),))


def gradient(pipeline: GPipe) -> None:
    parameters, x = {name: p.detach() for name, p in pipeline.named_parameters()}, rows(4)
    torch.func.grad(lambda p: torch.func.functional_call(pipeline, p, x).sum())(parameters)


def dual(pipeline: GPipe) -> None:
    with forward_ad.dual_level():
        pipeline(forward_ad.make_dual(rows(4).detach(), torch.ones(4, 3, dtype=torch.float64)))


# torch's forward_ad; on Python 3.14 and later it is "not supported" instead of "deprecated".
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is (deprecated|not supported)")
@pytest.mark.parametrize("transform", [jvp, gradient, dual])
def test_function_transforms_are_refused(pipeline: GPipe, transform: Callable[..., None]) -> None:
    """Once they ran, but the workers' threads lack their state: the derivatives were zero."""
    with pytest.raises(RuntimeError, match="must not run inside of torch.func"):
        transform(pipeline)


def test_casts_do_not_add_up_under_the_callers_autocast(pipe: Pipe) -> None:
    """Once autocast kept a copy of the weights for every mini-batch until its block ended."""
    pipeline = pipe(perceptron(4).float(), devices=1)
    x = rows(4).detach().float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline(x).sum().backward()
        gc.collect()
        before = low_precision_tensors()
        for _ in range(5):
            pipeline(x).sum().backward()
        gc.collect()
        after = low_precision_tensors()

    assert after <= before


def low_precision_tensors() -> int:
    # type(), because isinstance() asks objects for their class, and some of torch's warn.
    return sum(type(o) is Tensor and o.dtype == torch.bfloat16 for o in gc.get_objects())

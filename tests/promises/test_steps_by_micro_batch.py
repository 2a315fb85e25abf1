"""Transparency: a loss for each micro-batch gives what the whole mini-batch gives.

The reference is the plain module in one ordinary graph: of the whole mini-batch where layers do not
mix its rows, else of one micro-batch after the other. Cases are drawn as in
`test_drawn_models.py`; what comes before and after the pipeline is drawn with them.

Here are also the tests of ``pipeline/micro_batch_steps``, ``step_minibatch`` and ``user_step``.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from threading import Event
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.data.pytree import map_tensors, tree_flatten
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import (
    SCHEDULES,
    Block,
    ByMicroBatch,
    folded,
    is_folded,
    looped,
)
from tests.support.blocks import drawn_block
from tests.support.drawn import Reference, count_calls, split
from tests.support.grammar import Case, cases, drawing_models, models
from tests.support.live_activations import peak_live
from tests.support.models import assert_same, gradients, perceptron, rows
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Sums over normalised rows are the same without being functions of weights.
    pytest.mark.filterwarnings("ignore:the loss term .sum. is the same for all micro-batches"),
]


ROUNDING = 1e-11  # of the largest gradient, in double precision


@dataclass(frozen=True)
class Around:
    """What a step does around the pipeline.

    Attributes:
        scale: Whether a trained scale comes before the pipeline.
        residual: Whether what came before is in the loss, too.
        head: Whether a trained scale follows.
        penalty: Whether the loss has one on the parameters of the pipeline's own layers.
        tied: Whether the scale before and that after are one.
        weighted: Whether the step says the weight of each loss.
    """

    scale: bool = False
    residual: bool = False
    head: bool = False
    penalty: bool = False
    tied: bool = False
    weighted: bool = False


class Scales(nn.Module):
    """The parameters around the pipeline."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.after = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        if around.tied:
            self.after = self.before


def mean_loss(output: Any) -> Tensor:
    """A mean over rows, whose gradient differs from row to row."""
    leaves = [leaf for leaf in tree_flatten(output).leaves if isinstance(leaf, Tensor)]
    floating = [x.double() for x in leaves if x.is_floating_point()]
    return sum(
        ((x.tanh() ** 2 + x.sin()).mean() for x in floating),
        start=torch.zeros((), dtype=torch.float64),
    )


def step_with(
    run: Callable[[Any], Any], scales: Scales, module: nn.Module, case: Case, around: Around
) -> Callable[[Tensor], dict[str, Any]]:
    """A training step around what ``run`` runs."""

    def step(x: Tensor) -> dict[str, Any]:
        if around.scale and x.is_floating_point():
            x = x * scales.before
        output = run(case.model.input(x))
        if around.head:
            output = map_tensors(
                lambda y: y * scales.after if y.dtype == torch.float64 else y, output
            )
        loss = mean_loss(output)
        # A stage edits a copy of its input, the plain module the tensor itself.
        if around.residual and x.is_floating_point() and case.model.start != "edited":
            loss = loss + mean_loss(x)
        # One that stages share would count once for each, which is refused.
        if around.penalty and not any("shared" in word for word in case.model.words):
            # Some layers edit frozen parameters in each forward.
            floating = [p for p in module.parameters() if p.requires_grad]
            loss = loss + 0.01 * sum(map(square, floating), start=loss.new_zeros(()))
        found = {"loss": loss, "rows": len(x)}
        return found | ({"loss_weight": len(x)} if around.weighted else {})

    return step


def check(case: Case, around: Around) -> None:
    """Compare some steps of a pipeline with those of the plain module."""
    with torch.random.fork_rng(devices=[]):
        module = case.build()
        reference = Reference(case, module)
        scales = Scales(around)
        others = deepcopy(scales)
        pipeline = GPipe(
            module,
            case.balance,
            devices=["cpu"] * case.devices,
            chunks=chunks_of(case),
            activation_checkpointing=case.mode,
            deferred_batch_norm=False,
            threads=case.threads,
            split_backward=case.split,
            folded=folds(case),
        )
        actual = step_with(pipeline, scales, module, case, around)
        plain = step_with(reference.module, others, reference.module, case, around)
        generator = torch.Generator().manual_seed(case.seed)
        try:
            for step in case.steps:
                module.train(step.training)
                reference.module.train(step.training)
                x = case.model.tensor(step.rows[0], generator)
                schedule = schedule_of(case)
                outcome = pipeline.by_micro_batch(actual, x, schedule=schedule, around=scales)
                sizes = [each["rows"] for each in outcome.results]
                for dropout in reference._dropouts:
                    dropout.taken = 1
                loss = whole(plain, x, sizes)
                assert outcome.loss is not None
                assert outcome.loss.requires_grad == loss.requires_grad
                if loss.requires_grad:
                    loss.backward()
                    outcome.loss.backward()
                assert_same([outcome.loss.detach()], [loss.detach()], within=ROUNDING)
                assert_same(
                    [gradients(module), gradients(scales)],
                    [gradients(reference.module), gradients(others)],
                    within=ROUNDING,
                )
                if case.mode == "never":
                    assert_same(
                        dict(module.named_buffers()), dict(reference.module.named_buffers())
                    )
        finally:
            pipeline.close()


def square(parameter: Tensor) -> Tensor:
    return (parameter**2).sum()


def chunks_of(case: Case) -> int:
    """A number of micro-batches that interleaved stages can have."""
    interleaved = len(case.balance) > case.devices
    return -(-case.chunks // case.devices) * case.devices if interleaved else case.chunks


def schedule_of(case: Case) -> ByMicroBatch | Block:
    """Any that there is for its stages; half of those with split backwards, a third by a block."""
    n, workers = len(case.balance), case.devices
    if case.seed % 3 == 0:
        placement = folded(n, workers) if n == 2 * workers else looped(n, workers)
        return drawn_block(placement, Random(case.seed), split=case.seed % 2 == 0)
    if not (case.split and case.seed % 2):
        return "1f1b"
    of_size: dict[float, list[ByMicroBatch]] = {
        1: ["zero_bubble"],
        2: [name for name in get_args(ByMicroBatch) if SCHEDULES[name].folded],
    }
    possible = of_size.get(n / workers, ["1f1b"])
    return possible[case.seed // 2 % len(possible)]


def folds(case: Case) -> bool:
    """Return True if its stages go down the devices and back, two on each."""
    return is_folded(schedule_of(case), case.devices)


def whole(plain: Callable[[Tensor], dict[str, Any]], x: Tensor, sizes: list[int]) -> Tensor:
    """The weighted mean of the losses of micro-batches, in one graph."""
    parts = zip(split(x, sizes), sizes, strict=True)
    return sum(
        (plain(part)["loss"] * (size / len(x)) for part, size in parts),
        start=torch.zeros((), dtype=torch.float64),
    )


around = st.builds(Around, *[st.booleans()] * 6)
# Loss terms of layers are refused.
steps = cases(models()).filter(
    lambda case: not any("loss terms" in word for word in case.model.words)
)


@settings(max_examples=settings().max_examples // 3)
@given(case=steps, around=around)
def test_drawn_steps(case: Case, around: Around) -> None:
    check(case, around)


drawing = cases(drawing_models()).filter(
    lambda case: not any("loss terms" in word for word in case.model.words)
)


@settings(max_examples=settings().max_examples // 8)  # each runs two pipelines
@given(case=drawing, around=around)
def test_drawn_steps_that_draw(case: Case, around: Around) -> None:
    """The numbers are the same with threads, without, and on recomputation."""
    found = []
    for each in (case, replace(case, threads=not case.threads, mode="never")):
        with torch.random.fork_rng(devices=[]):
            module, scales = each.build(), Scales(around)
            pipeline = GPipe(
                module,
                each.balance,
                devices=["cpu"] * each.devices,
                chunks=chunks_of(each),
                activation_checkpointing=each.mode,
                threads=each.threads,
                split_backward=each.split,
            )
            step = step_with(pipeline, scales, module, each, around)

            def noisy(x: Tensor, step: Callable[[Tensor], dict[str, Any]] = step) -> dict[str, Any]:
                result = step(x)
                return result | {"loss": result["loss"] * (1 + torch.rand(()))}

            x = each.model.tensor(each.steps[0].rows[0], torch.Generator().manual_seed(each.seed))
            losses = []
            for _ in range(2):
                loss = pipeline.by_micro_batch(noisy, x, around=scales).loss
                assert loss is not None
                losses.append(loss.detach())
                if loss.requires_grad:
                    loss.backward()
            found.append([losses, gradients(module), gradients(scales)])
            pipeline.close()

    assert_same(*found)


@with_and_without_threads
def test_backward_of_a_step_is_not_under_autocast(pipe: Pipe) -> None:
    """As that of a Trainer, which runs the step only under it."""
    pipeline, seen = pipe(perceptron(), mode="never"), []

    def step(x: Tensor) -> Tensor:
        y = pipeline(2 * x)
        assert torch.is_autocast_enabled("cpu")
        y.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        return y.mean()

    with torch.autocast("cpu"):
        pipeline.by_micro_batch(step, rows(7))

    assert seen == [False] * 3


def test_hook_on_a_value_that_goes_around_the_pipeline_too(pipe: Pipe) -> None:
    """Once it was called for each of two parts of the gradient, silently."""
    pipeline = pipe(perceptron(), mode="never")
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = x * scale
        y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return pipeline(y).mean() + y.mean()

    with pytest.raises(RuntimeError, match="a hook on a gradient must see all of it"):
        pipeline.by_micro_batch(step, rows(7))


@pytest.mark.parametrize("threads", [False, True])
def test_input_that_is_edited_before_it_is_recomputed_with(threads: bool) -> None:
    """Once a V, which recomputes some time after the code has gone on, used the edited input."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    pipeline = GPipe(
        layers,
        [1] * 4,
        devices=["cpu"] * 2,
        folded=True,
        chunks=4,
        activation_checkpointing="always",
        threads=threads,
    )
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = x * scale
        z = pipeline(y)
        y.mul_(2)
        return z.square().mean() + y.mean()

    with pytest.raises(RuntimeError, match="must not be edited between a forward and its backward"):
        pipeline.by_micro_batch(
            step, torch.rand(8, 4, dtype=torch.float64), schedule="zero_bubble_v"
        )
    pipeline.close()


@with_and_without_threads
def test_operations_of_stages_are_counted(pipe: Pipe) -> None:
    """A dispatch mode sees its own thread only, so that runs all stages."""
    plain, x = perceptron(), rows(7).detach()
    pipeline = pipe(plain, mode="never")
    found = []

    for run in (
        lambda: plain(x).mean().backward(),
        lambda: pipeline.by_micro_batch(lambda x: pipeline(x).mean(), x),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        found.append(counter.get_total_flops())

    assert found[0] == found[1] > 0


def test_threads_or_one_thread_as_is_faster(pipe: Pipe) -> None:
    pipeline = pipe(perceptron(), mode="never", threads="auto")

    for _ in range(20):
        pipeline.by_micro_batch(lambda x: pipeline(x).mean(), rows(7))

    assert pipeline.engine.found_way is not None


def test_interleaved_stages(pipe: Pipe) -> None:
    plain = perceptron(8)
    pipeline = pipe(plain, stages=4, devices=2, chunks=4, mode="never")
    loss = pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(7)).loss
    assert loss is not None
    loss.backward()

    expected = plain(rows(7)).square().mean()
    expected.backward()
    assert_same([loss.detach(), gradients(pipeline)], [expected.detach(), gradients(plain)])
    pipeline.chunks = 3
    with pytest.raises(ValueError, match="a multiple of the number of devices"):
        pipeline.by_micro_batch(lambda x: pipeline(x).mean(), rows(7))


def test_folded_stages(pipe: Pipe) -> None:
    """Fill-drain runs on them too, as in evaluation, and a new balance keeps them there."""
    plain = perceptron(8)
    pipeline = pipe(plain, stages=4, devices=2, chunks=5, mode="never", folded=True)
    expected = plain(rows(11)).square().mean()
    expected.backward()

    for balance in ([2, 2, 2, 2], [1, 3, 2, 2]):
        pipeline.rebalance(balance)
        pipeline.zero_grad()
        outcome = pipeline.by_micro_batch(
            lambda x: pipeline(x).square().mean(), rows(11), schedule="zero_bubble_v"
        )
        assert outcome.loss is not None
        outcome.loss.backward()

        assert pipeline.layout.placement == (0, 1, 1, 0)
        assert_same(
            [outcome.loss.detach(), gradients(pipeline)], [expected.detach(), gradients(plain)]
        )
        assert_same(pipeline(rows(11)), plain(rows(11)))
    with pytest.raises(ValueError, match=r"needs stage j on device j mod 2"):
        pipeline.by_micro_batch(lambda x: pipeline(x).mean(), rows(7), schedule="1f1b")


def test_folded_stages_that_cannot_be(pipe: Pipe) -> None:
    with pytest.raises(ValueError, match="must be two on each: got 2 stages on 2 devices"):
        pipe(perceptron(), stages=2, folded=True)


def test_hooks_and_accumulation(pipe: Pipe) -> None:
    """A gradient arrives once per backward, multiplied by that of the loss, and is added."""
    plain = perceptron()
    pipeline = pipe(plain, mode="never")
    calls = count_calls(pipeline)
    for factor in (1.0, 0.25):
        loss = pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(7)).loss
        assert loss is not None
        assert sum(calls.values()) in (0, len([*plain.parameters()]))
        (factor * loss).backward()
        (factor * plain(rows(7)).square().mean()).backward()

    assert set(calls.values()) == {2}
    assert_same(gradients(pipeline), gradients(plain))


def test_step_that_edits_its_batch(pipe: Pipe) -> None:
    """Once that of one micro-batch counted as one of what another had saved."""
    plain, x = perceptron(), rows(7).detach()
    expected = x.clone()
    pipeline = pipe(plain, mode="never")
    loss = pipeline.by_micro_batch(lambda x: pipeline(x.mul_(0.5)).square().mean(), x).loss
    assert loss is not None
    loss.backward()
    plain(expected.mul_(0.5)).square().mean().backward()

    assert_same([gradients(pipeline), x], [gradients(plain), expected])


@with_and_without_threads
def test_running_statistics_of_batch_norms(pipe: Pipe) -> None:
    """They move once for each mini-batch, by its whole."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)).double()
    first = deepcopy(plain[0])  # whose inputs are the same in micro-batches and in one
    pipeline = pipe(plain, mode="never", deferred_batch_norm=True)
    for _ in range(2):
        pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(7))
        first(rows(7))

    torch.testing.assert_close(pipeline[0].state_dict(), first.state_dict())
    assert pipeline[2].num_batches_tracked == 2


def test_lists_that_cannot_be_cut(pipe: Pipe) -> None:
    pipeline = pipe(perceptron())
    batch = {"x": rows(4), "targets": [torch.tensor(k) for k in range(4)]}
    with pytest.raises(ValueError, match="a list with an entry per row must be cut"):
        pipeline.by_micro_batch(lambda b: pipeline(b["x"]).mean(), batch)


def test_parts_of_a_batch_with_rows_of_their_own(pipe: Pipe) -> None:
    """The error said to give each micro-batch one of them whole, such as all labelled rows."""
    pipeline = pipe(perceptron())
    batch = {"labelled": rows(4), "unlabelled": rows(12)}
    with pytest.raises(ValueError, match="in dim 0: got") as error:
        pipeline.by_micro_batch(lambda b: pipeline(torch.cat([*b.values()])).mean(), batch)
    assert "write schedule='fill_drain', which cuts only the input" in error.value.__notes__[0]


def test_zero_bubble(pipe: Pipe) -> None:
    """Stage j is j micro-batches late with the weights, and holds no more than n of them."""
    plain = perceptron(6)
    pipeline = pipe(plain, stages=3, chunks=7, mode="never", threads=False)
    loss = pipeline.by_micro_batch(
        lambda x: pipeline(x).square().mean(), rows(7), schedule="zero_bubble"
    ).loss
    assert loss is not None
    loss.backward()

    expected = plain(rows(7)).square().mean()
    expected.backward()
    assert_same([loss.detach(), gradients(pipeline)], [expected.detach(), gradients(plain)])
    assert pipeline.timeline is not None
    ran = [span.action for span in pipeline.timeline.spans if span.worker == 2]
    assert [str(action) for action in ran if str(action)[0] in "BW"] == (
        ["B0", "B1", "B2", "W0", "B3", "W1", "B4", "W2", "B5", "W3", "B6", "W4", "W5", "W6"]
    )
    assert peak_live(pipeline.timeline.schedule) == (3, 3, 3)


class Looping(nn.Module):
    """Loops over its layers, with more of the model around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@with_and_without_threads
def test_model_that_loops_over_its_layers(threads: bool) -> None:
    plain = Looping().double()
    model = GPipe(
        deepcopy(plain), [2, 2], module="layers", devices=["cpu"] * 2, chunks=4, threads=threads
    )
    for ids in (torch.arange(9), torch.arange(6)):
        loss = model.by_micro_batch(lambda ids: model(ids).square().mean(), ids).loss
        assert loss is not None
        loss.backward()
        plain(ids).square().mean().backward()
    model.close()

    assert_same(gradients(model), gradients(plain))


class Keeping(Looping):
    """Keeps the states between its layers, too."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        self.states = []
        for layer in self.layers:
            x = layer(x)
            self.states.append(x)
        return self.head(x)


@with_and_without_threads
def test_states_that_a_forward_leaves_on_itself(threads: bool) -> None:
    """Those of a later micro-batch were there, and the loss was said to mix rows between blocks."""
    module = Keeping().double()
    model = GPipe(module, [2, 2], module="layers", devices=["cpu"] * 2, chunks=4, threads=threads)

    def step(ids: Tensor) -> Tensor:
        output = model(ids).square().mean()
        return output + sum(x.square().mean() for x in module.states)

    with pytest.raises(RuntimeError, match="Let the forward return what the loss needs.*square"):
        model.by_micro_batch(step, torch.arange(9))
    step(torch.arange(9)).backward()
    model.close()


class Then(nn.Module):
    """Calls a function, and returns its input."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        return x


class Gated(nn.Module):
    """A layer beside a parameter of its own, and a batch norm, whose forward the engine patches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.norm(self.linear(x))


class Nested(nn.Module):
    """Blocks, parameters between them, and functions that run in it: when traced and in layers."""

    def __init__(self, *functions: Callable[[], object]) -> None:
        super().__init__()
        self.traced: Callable[[], object]
        traced, first, second = functions
        self.token = nn.Parameter(torch.tensor(0.7))
        self.first, self.second = Gated(), Gated()
        self.layers = nn.ModuleList([Then(first), Then(second)])
        self.traced = traced

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        if scale:
            self.traced()
        x = self.layers[0](self.first(x * scale) + self.token)
        return self.second(self.layers[1](x)) + self.token


@with_and_without_threads
def test_traced_module_that_a_worker_runs(threads: bool) -> None:
    """A call of a new kind is traced while no worker is within its stage.

    The caller traced the call of the second micro-batch, here of another scale, while the first was
    in a stage. It met a batch norm's patched forward, which was gone when the trace had ended:
    "it changes BatchNorm1d.forward". Shadows that came or went meanwhile were "parameters that it
    does not read as attributes of modules". And the shadows of a parameter around the layers, here
    ``token``, let every step trace again, and end with "must be on the stage that first uses it".
    """
    inside, tracing, gone = Event(), Event(), Event()

    def wait_inside() -> None:
        inside.set()
        tracing.wait(0.2)  # for a trace that comes too early

    def trace() -> None:
        tracing.set()
        if inside.is_set():
            gone.wait(0.2)

    plain = Nested(int, int, int).double()
    module = Nested(trace, wait_inside, gone.set).double()
    module.load_state_dict(plain.state_dict())
    model = GPipe(module, [3, 3], devices=["cpu"] * 2, chunks=3, threads=threads)
    batch = {"x": rows(6), "scale": torch.arange(1.0, 7).repeat_interleave(2)[:6]}

    def step(run: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scale = batch["scale"][0].item()
        if run is model and scale == 2 and threads:
            inside.wait(5)
        return mean_loss(run(batch["x"], scale))

    for event in (inside, tracing, gone):
        event.clear()
    for _ in range(2):
        loss = model.by_micro_batch(lambda batch: step(model, batch), batch, around=model).loss
        assert loss is not None
        loss.backward()
        for k in range(3):
            piece = {name: x.split(2)[k] for name, x in batch.items()}
            (step(plain, piece) / 3).backward()
    model.close()

    assert_same(gradients(model), gradients(plain))


def test_no_step_is_said_to_run_while_layers_do() -> None:
    """On one thread, where a step is suspended then, and nothing is logged for its micro-batch."""
    running: list[int | None] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            code = pipeline.engine.code
            assert code is not None
            running.append(code.running)
            return x

    pipeline = GPipe(
        nn.Sequential(Looks(), nn.Linear(3, 3).double()), [1, 1], devices=["cpu"], chunks=3
    )

    def step(x: Tensor) -> Tensor:
        code = pipeline.engine.code
        assert code is not None
        running.append(code.running)
        return pipeline(x).mean()

    pipeline.by_micro_batch(step, rows(6))

    assert sorted(i for i in running if i is not None) == [0, 1, 2]
    assert running.count(None) >= 3

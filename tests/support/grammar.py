"""A grammar of models and of ways to run them.

A drawn :class:`Case` is a value that prints, so that a failing example can be read and run again.
Its model is a sequence of words from the vocabulary, or of phrases (:class:`Passing`), in which
other values accompany the tensor through some of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpipe.core.data.pytree import tree_flatten
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call
from tests.support.pipes import MODES
from tests.support.vocabulary import (
    COMPANY,
    DRAWING,
    EMBEDDINGS,
    FLAT_BATCH_NORMS,
    FORMS,
    KINDS,
    ROWWISE_COMPANY,
    Momentum,
    Runs,
    Through,
)

GRAD: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}
DRAWN_MODES: list[ActivationCheckpointing] = [*MODES, 3]


def recomputation(stages: int) -> st.SearchStrategy[ActivationCheckpointing]:
    """Which micro-batches are recomputed, by all stages alike or by each."""
    of_each = st.lists(st.integers(0, 4), min_size=stages, max_size=stages)
    return st.sampled_from(DRAWN_MODES) | of_each.map(tuple)


@dataclass(frozen=True)
class Passing:
    """A run in which a tensor goes through other runs in company, which is added to it at the end.

    Attributes:
        form: Which of :data:`FORMS`.
        company: Its names.
        runs: The names of the runs.
        edits: Whether the integers in the company are edited in place on their way.
    """

    form: str
    company: tuple[str, ...]
    runs: tuple[str, ...]
    edits: bool

    def layers(self, runs: Runs) -> list[nn.Module]:
        through = [Through(FORMS[self.form], each) for name in self.runs for each in runs[name]()]
        edits = [Call(self.edit)] if self.edits else []
        return [Call(self.fork), *edits, *through, Call(self.join)]

    def fork(self, x: Tensor) -> Any:
        return FORMS[self.form].pack(x, [COMPANY[name](x) for name in self.company])

    def edit(self, tree: Any) -> Any:
        for each in tensors(FORMS[self.form].unpack(tree)[1]):
            if each.dtype == torch.long:
                each.add_(1)
        return tree

    def join(self, tree: Any) -> Tensor:
        x, company = FORMS[self.form].unpack(tree)
        return torch.tanh(sum(tensors(company), start=x))


@dataclass(frozen=True)
class Model:
    """The layers of an nn.Sequential and what it takes, in words.

    Attributes:
        kind: Which of :data:`KINDS`.
        start: How the input comes in: as a tensor ("bare"), as one that the first layer edits in
            place ("edited"), as integers for one of :data:`EMBEDDINGS`, or in company.
        runs: The runs, by name.
        end: The company in which the output goes out, if any.
    """

    kind: str
    start: str | Passing
    runs: tuple[str | Passing, ...]
    end: Passing | None

    @property
    def words(self) -> set[str]:
        """The names of all runs and all company."""
        phrases = [each for each in (self.start, *self.runs, self.end) if isinstance(each, Passing)]
        alone = {run for run in self.runs if isinstance(run, str)}
        return alone.union(*((*phrase.company, *phrase.runs) for phrase in phrases))

    @property
    def mixes(self) -> bool:
        """Whether it gives something else for a mini-batch than for its micro-batches."""
        return not self.words <= KINDS[self.kind].rowwise.keys() | ROWWISE_COMPANY.keys()

    @property
    def least_rows(self) -> int:
        """How many rows a mini-batch needs: a batch norm must see two values of each channel."""
        return 2 if self.kind == "flat" and self.words & FLAT_BATCH_NORMS.keys() else 1

    def build(self) -> nn.Sequential:
        """The layers, in float64."""
        runs = KINDS[self.kind].rowwise | KINDS[self.kind].mixing | DRAWING
        layers: list[nn.Module] = []
        if isinstance(self.start, Passing):
            layers += self.start.layers(runs)[1:]
        elif self.start in EMBEDDINGS:
            layers += EMBEDDINGS[self.start]()
        elif self.start == "edited":
            layers += [nn.ELU(inplace=True)]
        for run in self.runs:
            layers += run.layers(runs) if isinstance(run, Passing) else runs[run]()
        if self.end is not None:
            layers += self.end.layers(runs)[:-1]
        module = nn.Sequential(*layers).double()
        for each in module.modules():
            if isinstance(each, _NormBase) and each.running_mean is not None:
                each.running_mean.normal_()  # a past
        return module

    def tensor(self, rows: int, generator: torch.Generator) -> Tensor:
        """What :meth:`input` makes an input of."""
        shape = KINDS[self.kind].shape
        if self.start in EMBEDDINGS:
            return torch.randint(5, (rows, *shape[:-1]), generator=generator)
        return torch.randn(rows, *shape, dtype=torch.float64, generator=generator)

    def input(self, x: Tensor) -> Any:
        """What the first layer takes."""
        return self.start.fork(x) if isinstance(self.start, Passing) else x


@dataclass(frozen=True)
class Step:
    """One forward or two, a backward for both, and what comes then.

    Attributes:
        rows: The sizes of the mini-batches.
        grad: Which of :data:`GRAD`.
        training: Whether in training mode.
        between: A forward without gradients between forward and backward: in the same mode or eval.
        then: Gradients may accumulate, be forgotten, or make an optimizer step.
        times: How often repeated layers run.
    """

    rows: tuple[int, ...] = (8,)
    grad: str = "grad"
    training: bool = True
    between: str | None = None
    then: str = "forget"
    times: int = 1


@dataclass(frozen=True)
class Case:
    """A model and how to run it.

    Attributes:
        frozen: The numbers of parameters that require no gradient.
        frozen_stages: Stages of which none does.
        leaf: Whether the input requires a gradient, if it can.
        split: Whether the gradients of the weights are computed apart.
    """

    model: Model
    balance: tuple[int, ...]
    steps: tuple[Step, ...]
    devices: int = 2
    chunks: int = 4
    mode: ActivationCheckpointing = "always"
    threads: bool = True
    deferred: bool = True
    frozen: frozenset[int] = frozenset()
    frozen_stages: frozenset[int] = frozenset()
    leaf: bool = True
    seed: int = 1
    split: bool = False

    def build(self) -> nn.Sequential:
        """The plain module, always the same."""
        torch.manual_seed(self.seed)
        module = self.model.build()
        for k, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(k not in self.frozen)
        for j, (first, end) in enumerate(pairwise(accumulate(self.balance, initial=0))):
            if j in self.frozen_stages:
                module[first:end].requires_grad_(False)
        for each in module.modules():
            if isinstance(each, Momentum):
                each.slow.requires_grad_(False)
        return module

    def sizes(self, rows: int) -> list[int]:
        """The rows of each micro-batch; with a batch norm there are two in each, where possible."""
        least = 2 if any("batch norm" in word for word in self.model.words) else 1
        m = max(1, min(self.chunks, rows // least))
        return [len(part) for part in torch.arange(rows).tensor_split(m)]


def models() -> st.SearchStrategy[Model]:
    """Models of all kinds, half of which do not mix."""
    strategies = []
    for name, kind in KINDS.items():
        strategies.append(_models(name, [*kind.rowwise], [*ROWWISE_COMPANY]))
        strategies.append(_models(name, [*kind.rowwise, *kind.mixing], [*COMPANY]))
    return st.one_of(strategies)


def drawing_models() -> st.SearchStrategy[Model]:
    """Models of which most draw random numbers."""
    return st.one_of(
        [
            _models(name, [*kind.rowwise, *kind.mixing, *DRAWING, *DRAWING], [*COMPANY])
            for name, kind in KINDS.items()
        ]
    )


def _models(kind: str, runs: list[str], company: list[str]) -> st.SearchStrategy[Model]:
    run = st.sampled_from(runs)
    passing = st.builds(
        Passing,
        form=st.sampled_from(sorted(FORMS)),
        company=st.lists(st.sampled_from(company), min_size=1, max_size=3).map(tuple),
        runs=st.lists(run, max_size=2).map(tuple),
        edits=st.booleans(),
    )
    starts = ["bare", "edited", *([] if kind == "image" else EMBEDDINGS)]
    return st.builds(
        Model,
        kind=st.just(kind),
        start=st.sampled_from(starts) | passing,
        runs=st.lists(run | run | passing, min_size=2, max_size=5).map(tuple),
        end=st.none() | passing,
    )


@st.composite
def cases(draw: st.DrawFn, models: st.SearchStrategy[Model]) -> Case:
    """A model and all that fits it."""
    model = draw(models)
    layers = len(model.build())
    n = draw(st.integers(1, min(4, layers)))
    ends = draw(st.lists(st.integers(1, layers - 1), min_size=n - 1, max_size=n - 1, unique=True))
    step = st.builds(
        Step,
        rows=st.lists(st.integers(model.least_rows, 11), min_size=1, max_size=2).map(tuple),
        grad=st.sampled_from(["grad", "grad", "grad", "no grad", "inference"]),
        training=st.sampled_from([True, True, False]),
        between=st.sampled_from([None, None, "same", "eval"]),
        then=st.sampled_from(["accumulate", "forget", "update"]),
        times=st.integers(0, 3),
    )
    return Case(
        model,
        tuple(end - first for first, end in pairwise([0, *sorted(ends), layers])),
        tuple(draw(st.lists(step, min_size=2, max_size=3))),
        devices=draw(st.sampled_from([d for d in (1, 2, 3, 4) if n % d == 0])),
        chunks=draw(st.integers(1, 9)),
        mode=draw(recomputation(n)),
        threads=draw(st.sampled_from([True, True, False])),
        deferred=draw(st.sampled_from([True, True, False])),
        frozen=draw(st.frozensets(st.integers(0, 15), max_size=4)),
        frozen_stages=draw(st.frozensets(st.integers(0, n - 1), max_size=2)),
        leaf=draw(st.booleans()) and model.start != "edited",
        seed=draw(st.integers(0, 9999)),
        split=draw(st.booleans()),
    )


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a nested value."""
    return [leaf for leaf in tree_flatten(tree).leaves if isinstance(leaf, Tensor)]

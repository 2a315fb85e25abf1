"""The front-end for an nn.ModuleList that the forward of the user's model loops over.

While it is installed, the call of a block is recorded and answered with a placeholder. The call of
the last block runs all of them as a pipeline, and returns what it returned::

    for block in self.blocks:            # recorded: %1 <- stage 0: blocks.0(%0)
        x = block(x)                     #           %2 <- stage 0: blocks.1(%1)
                                         #           %3 <- stage 1: blocks.2(%2), and run

What the forward does with placeholders between two blocks is recorded too, and runs in the stage of
the block before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.frontends.interface import Frontend, RunProgram
from lightning_gpipe.core.frontends.module_list.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.blocks import Block, BlockCall
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import Call
from lightning_gpipe.core.frontends.module_list.checks import check_blocks, check_model
from lightning_gpipe.core.frontends.module_list.collecting import Collector
from lightning_gpipe.core.frontends.module_list.lines import user_line
from lightning_gpipe.core.frontends.module_list.outputs import run_recorded
from lightning_gpipe.core.frontends.module_list.owners import OwnerForward
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.recording import Knowledge, Recording
from lightning_gpipe.core.frontends.module_list.thread_state import ThreadState
from lightning_gpipe.core.plan import Partition, check_balance


class _Session(threading.local):
    """What one thread is doing.

    Attributes:
        forwards: The state of the thread at the beginning of each forward that it is in.
        recording: The recording of the calls of the blocks so far.
        depth: The number of forwards that it was in when that began.
        expected: The index of the block to be called next.
    """

    def __init__(self) -> None:
        self.forwards: list[ThreadState] = []
        self.recording: Recording | None = None
        self.depth = 0
        self.expected = 0


class Loop(Frontend):
    """Makes programs of the loop over the blocks of an nn.ModuleList.

    Args:
        model: The user's model.
        path: Where the nn.ModuleList is in it, such as ``"model.layers"``.

    Attributes:
        runs: How often the loop ran as a pipeline.

    Raises:
        TypeError, ValueError: If the blocks cannot be cut.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        check_model(model, path)
        self._title = f"module={path!r}"
        module = model.get_submodule(path)
        check_blocks(module, self._title)
        self._names = [f"{path}.{key}" for key in module._modules]
        self._modules = [child for child in module._modules.values() if child is not None]
        self._owners = _owners(model, path)
        self._partitions: list[Partition] = []
        self._begin()

    def _begin(self) -> None:
        """Begin as one that is not installed."""
        self._blocks: list[Block] = []
        self._forwards: list[OwnerForward] = []
        self._knowledge: Knowledge = {}
        self._caches = CacheRule()
        self._session = _Session()
        self._run: RunProgram | None = None
        self._plain = False
        self.runs = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of the model and its partitions, in which nothing is installed.
        kept = ("_title", "_modules", "_names", "_owners", "_partitions")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    @override
    def owner(self) -> nn.Module:
        return self._owners[-1]

    @property
    @override
    def units(self) -> Sequence[str]:
        return self._names

    @override
    def costs(self) -> list[int]:
        counted: set[nn.Parameter] = set()
        found = []
        for module in self._modules:
            own = set(module.parameters()) - counted
            counted |= own
            found.append(sum(parameter.numel() for parameter in own))
        return found

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        check_balance(balance, len(self._modules), self._title)
        bounds = pairwise(accumulate(balance, initial=0))
        self._partitions = [
            Partition(j, first, tuple(self._modules[first:end]), tuple(self._names[first:end]))
            for j, (first, end) in enumerate(bounds)
        ]
        return self._partitions

    @override
    def install(self, run: RunProgram) -> None:
        assert self._partitions, "partitions() comes before install()"
        self._check_free()
        self._run = run
        self._blocks = [
            Block(module, k, self._names[k], partition.index)
            for partition in self._partitions
            for k, module in zip(partition.indices, partition.layers, strict=True)
        ]
        for block in self._blocks:
            block.install(self._called)
        self._forwards = [OwnerForward(module, self._forward) for module in self._owners]
        for forward in self._forwards:
            forward.install()

    @override
    def remove(self) -> None:
        for forward in self._forwards:
            forward.remove()
        for block in self._blocks:
            block.remove()
        self._forwards, self._blocks, self._run = [], [], None

    @override
    @contextmanager
    def plain(self) -> Iterator[None]:
        before, self._plain = self._plain, True
        try:
            yield
        finally:
            self._plain = before

    def _forward(self, forward: Callable[[], Any]) -> Any:
        """Run the forward of a module that holds the nn.ModuleList."""
        session = self._session
        session.forwards.append(ThreadState.now(self._device(None)))
        depth = len(session.forwards)
        try:
            result = forward()
            if session.recording is not None and session.depth == depth:
                self._refuse_unfinished(session)
            if depth == len(self._owners) and not (self.runs or self._plain):
                self._refuse_unused()
            return result
        finally:
            session.forwards.pop()
            if session.depth == depth:
                self._drop(session, "The forward that called these blocks has ended without all.")

    def _called(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of block k, and run all if it is the last one."""
        block, session = self._blocks[k], self._session
        if self._plain:
            return block.run(*args, **kwargs)
        if session.recording is None and is_traced((args, kwargs), block.module.parameters()):
            return block.run(*args, **kwargs)
        recording = self._recording(session, block, args, kwargs)
        try:
            collector = Collector.active()
            run = block.run if collector is None else collector.around(block.run)
            kind = (block.kind, block.module.training, collector and collector.kind)
            call = Call(
                run,
                kind,
                block.name,
                user_line(),
                block.stage,
                block.device or recording.device,
                (block.module,),
                block.parameters,
            )
            made = recording.block(call, args, kwargs)
            if collector is not None:
                made, collected = made
                collector.give(collected)
            session.expected = k + 1
            if session.expected < len(self._blocks):
                return made
            session.recording = None
            assert self._run is not None, "installed"
            run_recorded(recording, self._run, len(self._partitions))
            self.runs += 1
            return made
        except BaseException:
            self._drop(session, "A call of these blocks has failed.")
            recording.end("A call of these blocks has failed.")
            raise

    def _recording(
        self, session: _Session, block: Block, args: Any, kwargs: dict[str, Any]
    ) -> Recording:
        """The recording that a call of this block belongs to."""
        recording = session.recording
        if recording is not None and block.k == session.expected:
            return recording
        tensors = [leaf for _, leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor)]
        if recording is not None:
            again = len(session.forwards) == session.depth > 0
            if block.k or again or any(isinstance(x, Placeholder) for x in tensors):
                self._refuse_order(session, block)
            self._drop(session, "The forward that called these blocks did not call all of them.")
        session.expected = 0
        if block.k:
            self._refuse_order(session, block)
        return self._new_recording(session, block, tensors)

    def _new_recording(self, session: _Session, block: Block, tensors: list[Tensor]) -> Recording:
        first = next((x for x in tensors if type(x) is not Placeholder and x.dim() > 0), None)
        if first is None:
            raise TypeError(
                f"the first block of a pipeline must be called with a tensor that has rows: got "
                f"none in the call of {block.name} at {user_line()}."
            )
        device = self._device(first)
        state = session.forwards[-1] if session.forwards else ThreadState.now(device)
        recording = Recording(first, self._knowledge, device, self._caches, state)
        session.recording, session.depth = recording, len(session.forwards)
        return recording

    def _device(self, first: Tensor | None) -> torch.device:
        """Where the results of the pipeline are: with the last block."""
        found = self._blocks[-1].device
        if found is None:
            return torch.device("cpu") if first is None else first.device
        return found

    def _drop(self, session: _Session, reason: str) -> None:
        """Forget a recording that will not run."""
        if session.recording is not None:
            session.recording.end(reason)
            session.recording = None

    def _refuse_order(self, session: _Session, block: Block) -> NoReturn:
        expected = self._blocks[session.expected].name
        self._drop(session, "The blocks were not called in order.")
        raise RuntimeError(
            "each block of a pipeline must be called once in every forward, in order: got a call "
            f"of {block.name} at {user_line()} where {expected} is next. A forward that skips "
            "blocks by chance does so with layerdrop: set it to 0. One that runs blocks several "
            "times, or in another order, cannot be cut here."
        )

    def _refuse_unfinished(self, session: _Session) -> NoReturn:
        left = [block.name for block in self._blocks[session.expected :]]
        found = left[0] if len(left) == 1 else f"{left[0]} to {left[-1]}"
        raise RuntimeError(
            "a forward that calls the first block of a pipeline must call all of them: it has "
            f"ended without {found}. A forward that skips blocks by chance does so with layerdrop: "
            "set it to 0. One that never calls the last blocks needs a model without them."
        )

    def _refuse_unused(self) -> NoReturn:
        owner = type(self._owners[-1]).__name__
        raise RuntimeError(
            f"the forward of {owner} must call the blocks of {self._title}, each as block(x): it "
            "has ended without, so that nothing ran as a pipeline. One that calls block.forward(x) "
            "goes around it."
        )

    def _check_free(self) -> None:
        taken = [
            name
            for name, module in zip(self._names, self._modules, strict=True)
            if isinstance(module.__dict__.get("_call_impl"), BlockCall)
        ]
        if taken:
            raise RuntimeError(
                f"a module has one pipeline at a time: {taken[0]} is in another one, of another "
                "Trainer whose fit or evaluation has not ended, or of a module around or within "
                "it. Evaluate in that Trainer's own loop, or give this one copy.deepcopy(model)."
            )


def _owners(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules from the model to the one that holds the nn.ModuleList."""
    found = [model]
    for name in path.split(".")[:-1]:
        found.append(found[-1].get_submodule(name))
    return found

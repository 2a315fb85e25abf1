"""The forwards of a model with blocks in a pipeline: what they call is recorded, and then run.

A forward begins and ends where a module does that holds the blocks. What it has called when it ends
must have been all of them, in order, each once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.frontends.interface import Processes, RunProgram
from lightning_gpipe.core.frontends.lines import calling_line
from lightning_gpipe.core.frontends.module_list.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.blocks import Block
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import Call
from lightning_gpipe.core.frontends.module_list.collecting import Collector
from lightning_gpipe.core.frontends.module_list.outputs import run_recorded
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.recording import Recording
from lightning_gpipe.core.frontends.module_list.remembered import Remembered
from lightning_gpipe.core.frontends.module_list.samples import only_here
from lightning_gpipe.core.frontends.module_list.thread_state import ThreadState


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


class Calls:
    """Receives the calls of the blocks of a pipeline.

    Args:
        blocks: The blocks, in order.
        owners: The modules from the model to the one that holds the blocks.
        title: What errors call the blocks.
        run: Runs programs.
        processes: Those that own the stages, if this one does not own all of them.

    Attributes:
        runs: How often the blocks ran as a pipeline.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owners: Sequence[nn.Module],
        title: str,
        run: RunProgram,
        processes: Processes | None = None,
    ) -> None:
        self._rehearse = only_here if processes is None else processes.everywhere
        self._tell = _nobody if processes is None else processes.tell
        self._blocks, self._owners, self._title, self._run = blocks, owners, title, run
        self._stages = blocks[-1].stage + 1
        self._remembered: dict[ThreadState, Remembered] = {}
        self._caches = CacheRule(spread=processes is not None)
        self._session = _Session()
        self._plain = False
        self.runs = 0

    @contextmanager
    def plain(self) -> Iterator[None]:
        """A ``with`` block in which blocks run when they are called."""
        before, self._plain = self._plain, True
        try:
            yield
        finally:
            self._plain = before

    def forward(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run the forward of a module that holds the nn.ModuleList."""
        session = self._session
        session.forwards.append(ThreadState.now(self._device(None)))
        depth = len(session.forwards)
        try:
            result = forward()
            if session.recording is not None and session.depth == depth:
                self._refuse_unfinished(session)
            if module is self._owners[-1] and not (self.runs or self._plain):
                self._refuse_unused()
            return result
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            session.forwards.pop()
            if session.depth == depth:
                self._drop(session, "The forward that called these blocks has ended without all.")

    def block(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of block k, and run all if it is the last one."""
        try:
            return self._called(k, args, kwargs)
        except BaseException as error:
            self._tell(error)
            raise

    def _called(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block, session = self._blocks[k], self._session
        if self._plain:
            return block.run(*args, **kwargs)
        recording = session.recording
        if recording is None or k != session.expected:
            if recording is None and is_traced((args, kwargs), block.module.parameters()):
                return block.run(*args, **kwargs)
            recording = self._begun(session, block, args, kwargs)
        try:
            made = self._made(recording, block, calling_line(above=3), (args, kwargs))
            session.expected = k = k + 1
            if k < len(self._blocks):
                return made
            session.recording = None
            run_recorded(recording, self._run, self._stages)
            self.runs += 1
            return made
        except BaseException:
            self._drop(session, "A call of these blocks has failed.")
            recording.end("A call of these blocks has failed.")
            raise

    def _made(
        self, recording: Recording, block: Block, line: str, given: tuple[Any, dict[str, Any]]
    ) -> Any:
        """What the call of a block will return; it is recorded if it is not on the tape."""
        recording.check_state(line)
        collector = Collector.active()
        if collector is None:
            entry = recording.follow(block.run, (block.kind, None), line, given)
            if entry is not None:
                return recording.answer(entry, given)
        call = _call_of(block, collector, line, recording.device)
        made = recording.block(call, given)
        if collector is not None:
            made, collected = made
            collector.give(collected)
        return made

    def _begun(
        self, session: _Session, block: Block, args: Any, kwargs: dict[str, Any]
    ) -> Recording:
        """The new recording that a call of this block begins, which must be the first one."""
        recording = session.recording
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
                f"none in the call of {block.name} at {calling_line()}."
            )
        device = self._device(first)
        state = session.forwards[-1] if session.forwards else ThreadState.now(device)
        remembered = self._remembered.setdefault(state, Remembered())
        recording = Recording(first, remembered, device, self._caches, state, self._rehearse)
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
            f"of {block.name} at {calling_line()} where {expected} is next. A forward that skips "
            "blocks by chance does so with layerdrop: set it to 0. One that runs blocks several "
            "times, or in another order, cannot be cut here."
        )

    def _refuse_unfinished(self, session: _Session) -> NoReturn:
        left = [block.name for block in self._blocks[session.expected :]]
        found = left[0] if len(left) == 1 else f"{left[0]} to {left[-1]}"
        raise RuntimeError(
            "a forward that calls the first block of a pipeline must call all of them: it has "
            f"ended without {found}. A forward that skips blocks by chance does so with layerdrop: "
            "set it to 0. One that never calls the last blocks needs a model without them, and one "
            "that calls a block again after the last cannot be cut here."
        )

    def _refuse_unused(self) -> NoReturn:
        owner = type(self._owners[-1]).__name__
        raise RuntimeError(
            f"the forward of {owner} must call the blocks of {self._title}, each as block(x): it "
            "has ended without, so that nothing ran as a pipeline. One that calls block.forward(x) "
            "goes around it."
        )


def _call_of(block: Block, collector: Collector | None, line: str, device: torch.device) -> Call:
    return Call(
        block.run if collector is None else collector.around(block.run),
        (block.kind, collector and collector.kind),
        block.name,
        line,
        block.stage,
        block.device or device,
        (block.module,),
        block.parameters,
    )


def _nobody(error: BaseException) -> None:
    """Tells an error to no other process."""

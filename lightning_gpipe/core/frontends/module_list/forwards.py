"""The forwards of a model with blocks in a pipeline: their calls are recorded, and then run.

Until the forward of the module that holds the blocks ends, it must have called each once, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import is_whole
from lightning_gpipe.core.faithful import Manager, is_traced, patched
from lightning_gpipe.core.frontends.frontend import OwnerProcesses, RunProgram
from lightning_gpipe.core.frontends.lines import calling_line, in_autograd_function
from lightning_gpipe.core.frontends.module_list.blocks import Block
from lightning_gpipe.core.frontends.module_list.collected_outputs import Collector
from lightning_gpipe.core.frontends.module_list.forward_state import ForwardState
from lightning_gpipe.core.frontends.module_list.materialize import run_recorded
from lightning_gpipe.core.frontends.module_list.recording import LoopRecording
from lightning_gpipe.core.frontends.module_list.rehearsal.learning import CacheRule
from lightning_gpipe.core.frontends.module_list.rehearsal.samples import only_here
from lightning_gpipe.core.frontends.module_list.tape.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.tape.calls import RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.tape.tape import History


class _Session(threading.local):
    """The forwards that one thread is in, and the recording of the calls of the blocks so far."""

    def __init__(self) -> None:
        self.forwards: list[ForwardState] = []  # the state at the beginning of each
        self.recording: LoopRecording | None = None
        self.depth = 0  # the number of forwards when the recording began
        self.next = 0  # the index of the block to be called next

    def state(self, device: torch.device) -> ForwardState:
        """Return the state in which all blocks must run, of which the first is called now.

        An autograd function that has changed it may be around each block, and hide its gradients.
        """
        now = ForwardState.now(device)
        if self.forwards and now != self.forwards[-1] and in_autograd_function():
            return self.forwards[-1]
        return now

    def drop(self, reason: str) -> None:
        if self.recording is not None:
            self.recording.end(reason)
            self.recording = None


class BlockCalls:
    """Receives the calls of the blocks of a pipeline, in order.

    ``owners`` are the modules from the model to the one that holds the blocks, ``title`` the name
    of the nn.ModuleList in errors, ``n`` the number of stages of the pipeline, and ``processes``
    those of the stages, if they have workers.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owners: Sequence[nn.Module],
        title: str,
        n: int,
        run: RunProgram,
        processes: OwnerProcesses | None,
    ) -> None:
        self._processes = processes
        self._rehearse = only_here if processes is None else processes.rehearse
        self._tell = (lambda error: None) if processes is None else processes.tell
        self._blocks, self._owners, self._title, self._run = blocks, owners, title, run
        self._n = n
        self._histories: dict[ForwardState, History] = {}
        self._caches = CacheRule(spread=processes is not None and processes.layout.spread)
        self._session = _Session()
        self._plain = False
        self._ran = False

    def plain(self) -> Manager:
        return patched([(vars(self), "_plain", True)])

    def forward(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        session = self._session
        session.forwards.append(ForwardState.now(self._device(None)))
        depth = len(session.forwards)
        try:
            result = forward()
            if session.recording is not None and session.depth == depth:
                self._refuse_unfinished(session)
            if module is self._owners[-1] and not (self._ran or self._plain):
                raise RuntimeError(
                    f"the forward of {type(module).__name__} must call the blocks of "
                    f"{self._title}, each as block(x): it has ended without, so that nothing ran "
                    "as a pipeline. One that calls block.forward(x) goes around it."
                )
            return result
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            session.forwards.pop()
            if session.depth == depth:
                session.drop("The forward that called these blocks has ended without all.")

    def block(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block, session = self._blocks[k], self._session
        recording = session.recording
        try:
            if self._plain:
                return block.run(*args, **kwargs)
            if recording is None or k != session.next:
                if recording is None and is_traced((args, kwargs), block.module.parameters()):
                    return block.run(*args, **kwargs)
                recording = self._begin(session, block, args, kwargs)
            result = self._record(recording, block, calling_line(above=2), (args, kwargs))
            session.next = k + 1
            if session.next == len(self._blocks):
                session.recording = None  # the thread may begin another forward meanwhile
                recording.check_states()
                stages = range(self._blocks[0].stage, block.stage + 1)
                run_recorded(recording, self._run, stages, self._n)
                self._ran = True
            return result
        except BaseException as error:
            session.drop("A call of these blocks has failed.")
            if recording is not None:
                recording.end("A call of these blocks has failed.")
            self._tell(error)
            raise

    def _record(
        self,
        recording: LoopRecording,
        block: Block,
        line: str,
        arguments: tuple[Any, dict[str, Any]],
    ) -> Any:
        """Return what the call of a block will return; record it if it is not on the tape."""
        recording.state.check(recording.device, line)
        collector = Collector.active()
        if collector is None:
            entry = recording.follow(block.run, (block.kind, None), line, arguments)
            if entry is not None:
                return recording.answer(entry, arguments)
        call = RecordedCall(
            block.run if collector is None else collector.around(block.run),
            (block.kind, collector and collector.kind),
            block.name,
            line,
            block.stage,
            block.device or recording.device,
            (block.module,),
            block.parameters,
        )
        result = recording.record(call, arguments)
        if collector is not None:
            result, collected = result
            collector.give(collected)
        return result

    def _begin(
        self, session: _Session, block: Block, args: Any, kwargs: dict[str, Any]
    ) -> LoopRecording:
        tensors = [leaf for _, leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor)]
        if session.recording is not None:
            again = len(session.forwards) == session.depth > 0
            if block.k or again or any(isinstance(x, Placeholder) for x in tensors):
                self._refuse_order(session, block)
            session.drop("The forward that called these blocks did not call all of them.")
        session.next = 0
        if block.k:
            self._refuse_order(session, block)
        first = next(filter(_may_have_rows, tensors), None)
        if first is None:
            raise TypeError(
                f"the first block of a pipeline must be called with a tensor that has rows: got "
                f"none in the call of {block.name} at {calling_line()}."
            )
        device = self._device(first)
        state = session.state(device)
        history = self._histories.setdefault(state, History())
        recording = LoopRecording(first, history, device, self._caches, state, self._rehearse)
        # Beside workers, which change modules too, the first micro-batch has been compared.
        recording.compares = self._processes is None or not self._processes.busy(block.stage)
        session.recording, session.depth = recording, len(session.forwards)
        return recording

    def _device(self, first: Tensor | None) -> torch.device:
        last = self._blocks[-1].device
        if last is None:
            return torch.device("cpu") if first is None else first.device
        return last

    def _refuse_order(self, session: _Session, block: Block) -> NoReturn:
        expected = self._blocks[session.next].name
        session.drop("The blocks were not called in order.")
        raise RuntimeError(
            "each block of a pipeline must be called once in every forward, in order: got a call "
            f"of {block.name} at {calling_line()} where {expected} is next. A forward that skips "
            "blocks by chance does so with layerdrop: set it to 0. One that runs blocks several "
            "times, or in another order, cannot be cut here."
        )

    def _refuse_unfinished(self, session: _Session) -> NoReturn:
        left = [block.name for block in self._blocks[session.next :]]
        names = left[0] if len(left) == 1 else f"{left[0]} to {left[-1]}"
        raise RuntimeError(
            "a forward that calls the first block of a pipeline must call all of them: it has "
            f"ended without {names}. A forward that skips blocks by chance does so with layerdrop: "
            "set it to 0. One that never calls the last blocks needs a model without them, and one "
            "that calls a block again after the last cannot be cut here."
        )


def _may_have_rows(tensor: Tensor) -> bool:
    no_rows = isinstance(tensor, Placeholder | nn.Parameter) or is_whole(tensor)
    return not no_rows and tensor.dim() > 0

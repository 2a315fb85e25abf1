"""Mutants that no test can notice, each with the reason; a run checks that this is still so."""

from __future__ import annotations

from typing import NamedTuple


class Explained(NamedTuple):
    """Effects that make no difference, or none that a test could see.

    Attributes:
        module: The module, within ``lightning_gpipe/core``.
        where: The function.
        effect: How the source of the effect begins.
        reason: Why the code has it all the same.
    """

    module: str
    where: str
    effect: str
    reason: str


_COST = "Costs time and changes nothing: "
_NEVER = "Cannot happen: "

EXPLAINED = (
    Explained(
        "transport/inline.py",
        "InlineTransport.run",
        "self._may_run = False",
        _COST + "the stacks of threads would be searched for a run before each one.",
    ),
    Explained(
        "transport/threads.py",
        "_Thread.work",
        "finally: self.caller = None",
        _NEVER + "a job does not raise, see WorkerThread.",
    ),
    Explained(
        "transport/threads.py",
        "Outcomes._run",
        "finally: self._ended.append(None)",
        _NEVER + "the handler above lets no error pass. It is written for one in the handler.",
    ),
    Explained(
        "run/autograd.py",
        "_Run.backward",
        "output_gradients.refuse_another_pass()",
        "Only two backwards at the same time, on two threads, come so far: another second one has "
        "ended at _Attach.",
    ),
    Explained(
        "run/minibatch.py",
        "MiniBatch.backward",
        "each.check_shadows()",
        "For a backward that autograd runs on the thread of a GPU while this one runs on that of "
        "the caller: on the CPU nothing comes between taking the gradients and this.",
    ),
    Explained(
        "run/passes.py",
        "Passes.release",
        "self._passes, self._by_stage, self._participation =",
        _COST + "hooks would be registered on shadows that nothing else holds.",
    ),
    Explained(
        "run/minibatch.py",
        "MiniBatch.backward",
        "self._workers, self.leaves =",
        _COST + "as above.",
    ),
    Explained(
        "faithful/journal.py",
        "Attributes.__delitem__",
        "delattr(",
        _NEVER + "attributes that the engine writes exist before. It completes the interface.",
    ),
    Explained(
        "faithful/held_generators.py",
        "_State.__delitem__",
        "raise AssertionError",
        _NEVER + "a generator always has a state. It completes the interface.",
    ),
    Explained(
        "faithful/contents.py",
        "_Elements.__delitem__",
        "raise AssertionError",
        _NEVER + "a container always has elements. It completes the interface.",
    ),
    Explained(
        "faithful/contents.py",
        "_Numbers.__delitem__",
        "raise AssertionError",
        _NEVER + "an array always has its numbers. It completes the interface.",
    ),
    Explained(
        "faithful/redirect.py",
        "_RedirectedDraws.__init__",
        "super().__init__()",
        "A subclass must call it; the modes of PyTorch 2.13 do without.",
    ),
    Explained(
        "faithful/shadow.py",
        "SwappedIn.__enter__",
        "self._shadows.in_place = True",
        _COST + "each micro-batch would put them in place once more.",
    ),
    Explained(
        "run/captures.py",
        "Captures.take_gradients",
        "self._gradients.clear()",
        "The pass is released right after; until then two references hold the same tensors.",
    ),
    Explained(
        "run/clocks.py",
        "CudaClock.reading",
        "last.synchronize()",
        "Needed on a real GPU, where the stream may not have reached the event yet; simulated "
        "streams reach it at once.",
    ),
    Explained(
        "run/clocks.py",
        "CudaClock.reading.seconds",
        "timestamp.synchronize()",
        "Needed on a real GPU, as above.",
    ),
)

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
_SOAK = "For an interrupt that comes between two lines: `make soak` strikes at each, and notices."
_COPIES = (
    "Needed on a real GPU, where copies go on beside the host; simulated ones are done at once."
)

EXPLAINED = (
    Explained(
        "transport/inline.py",
        "InlineTransport.run",
        "self._may_run = False",
        _COST + "the stacks of threads would be searched for a run before each one.",
    ),
    Explained(
        "transport/threads.py",
        "WorkerThread._work_for",
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
        "run/autograd_node.py",
        "_Sources.backward",
        "backward.check()",
        "Only two backwards at the same time, on two threads, come so far: another second one has "
        "ended at _Outputs.",
    ),
    Explained(
        "run/minibatch.py",
        "MiniBatch.backward",
        "watch.check_shadows()",
        "For a backward that autograd runs on the thread of a GPU while this one runs on that of "
        "the caller: on the CPU nothing comes between taking the gradients and this.",
    ),
    Explained(
        "run/minibatch_run.py",
        "MiniBatchRun.release",
        "self.passes, self.used_leaves =",
        _COST + "hooks would be registered on shadows that nothing else holds.",
    ),
    Explained(
        "faithful/random/private_generators.py",
        "_RedirectedDraws.__init__",
        "super().__init__()",
        "A subclass must call it; the modes of PyTorch 2.13 do without.",
    ),
    Explained(
        "run/backward/stage_backward.py",
        "StageBackward.take_gradients",
        "self._gradients.clear()",
        "The pass is released right after; until then two references hold the same tensors.",
    ),
    Explained(
        "run/observe/clocks.py",
        "CudaClock.reading",
        "last.synchronize()",
        "Needed on a real GPU, where the stream may not have reached the event yet; simulated "
        "streams reach it at once.",
    ),
    Explained(
        "run/observe/clocks.py",
        "CudaClock.reading.seconds",
        "timestamp.synchronize()",
        "Needed on a real GPU, as above.",
    ),
    Explained(
        "run/micro_batch_losses/step_minibatch.py",
        "StepMiniBatch._run_step",
        "self._outside.undo()",
        _SOAK,
    ),
    Explained(
        "run/micro_batch_losses/step_minibatch.py",
        "StepMiniBatch._run_pipeline",
        "finally: self.settle()",
        _COPIES,
    ),
    Explained(
        "run/micro_batch_losses/step_minibatch.py",
        "StepMiniBatch._run_pipeline",
        "self.settle()",
        _COPIES,
    ),
    Explained("run/minibatch.py", "MiniBatch._run_workers", "self.settle()", _COPIES),
    Explained(
        "run/micro_batch_losses/user_step.py",
        "UserStep._resume",
        "finally: self.running = None",
        "After an error the code of the mini-batch is dropped, and nobody asks what runs.",
    ),
    Explained("run/host/memory.py", "HostMemory.settle", "each.settle()", _COPIES),
    Explained("run/host/side_copies.py", "SideCopies.settle", "event.synchronize()", _COPIES),
    Explained(
        "run/host/side_copies.py",
        "SideCopies.settle",
        "self._under_way.clear()",
        _COST + "the host would wait again for what it has waited for.",
    ),
    Explained(
        "run/host/traffic.py",
        "HostTraffic.before",
        "self._activations[j].fetch(i)",
        _COST + "what is not fetched ahead is fetched where it is read.",
    ),
    Explained(
        "run/host/waiting_activations.py",
        "HostActivations._move",
        "self._away[i] = list(map(ref, moved))",
        _COST + "as above, nothing would be fetched ahead.",
    ),
    Explained(
        "run/host/waiting_activations.py",
        "_HostMemory.fetch",
        "stream.wait_event(self._left)",
        _COPIES,
    ),
)

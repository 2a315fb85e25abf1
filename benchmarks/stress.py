"""Claim: 200 steps of drawn models give every gradient of the plain module, whatever memory holds.

A tensor that is freed too early, or read before it is written, mostly has the right numbers all the
same, because memory keeps its contents. So here uninitialised memory is NaN; on a CPU freed memory
is overwritten with NaN; and another thread allocates what was just freed, writes NaN into it and
frees it again, on a GPU on the pipeline's streams and on one of its own. There a quarter of the
steps runs without the caching allocator, which is slow: then the use of a freed tensor is an
illegal access.

The models are small, in float64 and drawn anew in each run: convolutions, batch norms, skip
connections within stages and across them, tied weights; in one to four stages that share the
device, on worker threads or none, some beside a stage on the CPU; with several micro-batches, every
value of activation_checkpointing, and on a GPU side streams. Nothing waits for the device between
the steps of a model. Then each gradient of each step, each batch norm's statistics if they are not
deferred, and the parameters after the steps are compared with those of the plain nn.Sequential on
the CPU.

    python -m benchmarks.stress
    python -m benchmarks.stress --sanitizer 5    # also 5 steps under compute-sanitizer

Exits with 1 if anything differs by more than rounding. The drawn models are in stressed.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Event, Thread

import torch

from benchmarks.harness import Options, Report, options
from benchmarks.stressed import STEPS_OF_A_MODEL, draw, run

TOLERANCE = 1e-9  # relative to the largest entry; float64 rounds at 1e-16
NAN_WHEN_FREED = {  # without its per-thread caches, which would keep small pieces as they are
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=255",
}
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass
class Found:
    """What came of a number of steps."""

    steps: int = 0
    models: int = 0
    compared: int = 0
    different: int = 0
    largest: float = 0.0
    poisoned: bool = False
    seconds: float = 0.0


def main(argv: list[str] | None = None) -> None:
    """Run each part in a process of its own, as memory is set up when one starts."""
    given = options(
        "stress", __doc__, rounds=1, argv=argv, steps=200, seed=0, sanitizer=0, inside=""
    )
    if given.inside:
        print(json.dumps(asdict(steps(given.inside, given.steps, given.seed))))
        return
    report = Report(
        given,
        f"{given.steps} steps on {'a GPU' if torch.cuda.is_available() else 'CPU threads'}",
        columns=("", "steps", "models", "compared", "different", "largest difference", "seconds"),
    )
    for name, command, environment in parts(given):
        found = in_a_process(command, environment)
        report.rows.append(
            (
                name,
                *(str(n) for n in (found.steps, found.models, found.compared, found.different)),
                f"{found.largest:.1e}",
                f"{found.seconds:.1f}",
            )
        )
        report.target(f"tensors that differ: {name}", found.different, at_most=0)
        if environment is NAN_WHEN_FREED and not found.poisoned:
            report.notes.append(f"{name}: but it was not; this C library does it in another way.")
    report.publish()
    if not all(each.met for each in report.targets):
        sys.exit(1)


Part = tuple[str, list[str], Mapping[str, str]]


def parts(given: Options) -> Iterator[Part]:
    """Name, command and environment of each part of the run."""

    def inside(device: str, number: int, seed: int) -> list[str]:
        arguments = [f"--inside={device}", f"--steps={number}", f"--seed={seed}"]
        return [sys.executable, "-m", "benchmarks.stress", *arguments]

    if not torch.cuda.is_available():
        yield "freed memory is NaN", inside("cpu", given.steps, given.seed), NAN_WHEN_FREED
        return
    quarter = given.steps // 4
    yield "freed memory is taken", inside("cuda", given.steps - quarter, given.seed), {}
    yield "no caching allocator", inside("cuda", quarter, given.seed + 1), NO_CACHE
    tool = shutil.which("compute-sanitizer")
    if given.sanitizer and tool is not None:
        command = inside("cuda", given.sanitizer, given.seed + 2)
        memcheck = [tool, "--tool", "memcheck", "--error-exitcode", "99"]
        yield "compute-sanitizer memcheck", [*memcheck, *command], NO_CACHE
    elif given.sanitizer:
        print("compute-sanitizer is not on PATH: that part is left out", file=sys.stderr)


def in_a_process(command: Sequence[str], environment: Mapping[str, str]) -> Found:
    """What a process with these settings found; one that died found a difference."""
    settings = {**os.environ, **environment, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=False)
    *before, last = ended.stdout.strip().splitlines() or [""]
    print(*before, sep="\n", end="\n" if before else "")
    found = Found(different=1)
    for line in (last, *reversed(before)):  # a tool may have the last word
        if line.startswith('{"steps"'):
            found = Found(**json.loads(line))
            break
    if ended.returncode:
        print(f"exit code {ended.returncode}: {' '.join(command)}", file=sys.stderr)
        found.different += 1
    return found


def steps(device: str, number: int, seed: int) -> Found:
    """Take so many steps of drawn models, and compare."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # also: new memory is NaN
    torch.set_num_threads(1)  # the tensors are small
    found, start = Found(poisoned=poisoned()), time.perf_counter()
    side = torch.cuda.Stream() if device == "cuda" else None
    with churn(device, side):
        while found.steps < number:
            case = draw(seed * 1_000_003 + found.models, device)
            taken = min(STEPS_OF_A_MODEL, number - found.steps)
            for each in run(case, taken, side):
                found.compared += 1
                found.largest = max(found.largest, each.relative)
                if not each.relative <= TOLERANCE:  # NaN is no agreement
                    found.different += 1
                    if found.different <= 5:
                        print(f"{each} in {case}")
            found.models += 1
            found.steps += taken
    found.seconds = time.perf_counter() - start
    return found


def poisoned() -> bool:
    """Whether a tensor's memory is overwritten when it is freed: read it, and see."""
    x = torch.zeros(64, dtype=torch.float64)
    values = (ctypes.c_double * 64).from_address(x.data_ptr())
    del x
    return values[32] != values[32]


@contextmanager
def churn(device: str, side: torch.cuda.Stream | None) -> Iterator[None]:
    """Meanwhile, on another thread, take memory of all sizes, write NaN into it and free it."""
    stop = Event()
    streams: list[torch.cuda.Stream | None] = [None]  # the current one: the default
    if side is not None:
        streams += [side, torch.cuda.Stream()]

    def work() -> None:
        held: list[torch.Tensor] = []
        number = 0
        while not stop.wait(2e-4):
            number += 1
            with torch.cuda.stream(streams[number % len(streams)]):
                held.append(torch.full((2 ** (number % 15),), torch.nan, device=device).double())
            del held[: -(number % 8) or None]

    thread = Thread(target=work, name="churn")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()

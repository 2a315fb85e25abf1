"""Claim: no part of what a pipeline does before its first step delays that by much.

No part may take longer than a tenth of the time to plain Lightning's first step, its end included,
and one step more: importing the package, setting up, tracing or rehearsing the model's forward,
measuring the layers for ``balance="time"`` or a plan, planning, and what the first step takes
longer. Each fit is a process of its own, in turns; operators use one core, and the processor's time
counts, from the start of the process but without building the model.

    python -m benchmarks.time_to_first_step
    python -m benchmarks.time_to_first_step --models char,wide,llama,gpt2,resnet50

``char`` is the model of ``make demo``, in two stages; ``wide`` has many parameters in few layers.
``llama`` has 1.5 billion on the meta device and is planned for four devices, with a forward and a
backward of plain PyTorch on the meta device in the place of the steps. GPT-2 small needs
transformers, ResNet-50 torchvision.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.fit_begins import PARTS
from benchmarks.harness import Report, options
from benchmarks.harness.contest import Ratio

SHARE = 0.1  # of the time to the first step
WAYS = {"time": 'balance="time"', "plan": 'balance="time", chunks="auto"'}
EXTRA = ("import of lightning_gpipe", "setup", *PARTS)
STEP = "first step"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    defaults = {"models": "char,wide,llama", "ways": "time,plan"}
    given = options("time_to_first_step", __doc__, rounds=2, argv=argv, **defaults)
    report = Report(
        given, "Processor time up to the end of the first step", ("", "s, median", "x allowed")
    )
    for model in given.models.split(","):
        ways = given.ways.split(",")
        rounds = [
            {way: seconds(model, way) for way in ["plain", *ways]} for _ in range(given.rounds)
        ]
        plain = [each["plain"] for each in rounds]
        report.rows += [
            (f"{model}, plain, {part}", f"{median(each[part] for each in plain):.3f}", "")
            for part in plain[0]
        ]
        for way in ways:
            compare(report, model, way, plain, [each[way] for each in rounds])
    report.publish()


def compare(
    report: Report,
    model: str,
    way: str,
    plain: Sequence[Mapping[str, float]],
    ours: Sequence[Mapping[str, float]],
) -> None:
    """Add a row for each part of a pipeline, and the largest of them as the target."""
    found = {}
    for part in (*EXTRA, STEP):
        more = [
            each.get(part, 0.0) - (other[part] if part in ("setup", STEP) else 0.0)
            for each, other in zip(ours, plain, strict=True)
        ]
        found[part] = Ratio([x / allowed(each) for x, each in zip(more, plain, strict=True)])
        row = f"{model}, {WAYS[way]}, {part}"
        report.rows.append((row, f"{median(more):.3f}", f"{found[part]:.2f}"))
    worst = max(found, key=lambda part: found[part])
    report.target(f"{model}, {WAYS[way]}, the longest / allowed", found[worst], at_most=1.0)


def allowed(plain: Mapping[str, float]) -> float:
    """The seconds that a part may take."""
    to_first = plain["import"] + plain["setup"] + plain[STEP]
    return SHARE * to_first + plain["second step"]


def seconds(model: str, way: str) -> dict[str, float]:
    """The seconds of each part of a fit, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fit_begins", model, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()

"""Claim: pretrained weights go to their stages without a second copy of the model on the host.

A model of linear blocks is in a folder of safetensors shards. In a process of its own each
contestant makes a pipeline of it on the CPU, where the model itself is in the host's memory once:
*load_pretrained* builds it on the meta device and reads tensor by tensor; *joined* is the usual
way, a model with memory that loads a state dict of all shards. What is compared is by how much the
most memory that the process ever had is more than before, as a multiple of the model's size.

    python -m benchmarks.pretrained
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import Report, options
from lightning_gpipe import GPipe
from lightning_gpipe.core.frontends.pretrained import load_pretrained

AT_MOST = 1.15
WAYS = ("load_pretrained", "joined")


class Model(nn.Module):
    """A loop over linear blocks.

    Args:
        blocks: How many.
        width: Their width.
    """

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, width) to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--measure"]:
        way, where, *sizes = arguments[1:]
        print(measure(way, Path(where), *map(int, sizes)))
        return
    given = options("pretrained", __doc__, rounds=1, argv=argv, blocks=16, width=2048)
    report = Report(
        given,
        f"{given.blocks} blocks of {given.width} x {given.width}, a shard each",
        columns=("", "ms, median", "quartiles"),
    )
    with TemporaryDirectory() as folder:
        write(Path(folder), given.blocks, given.width)
        size = 4 * given.blocks * given.width**2
        for way in WAYS:
            ask = [way, folder, str(given.blocks), str(given.width)]
            command = [sys.executable, "-m", "benchmarks.pretrained", "--measure", *ask]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            found = int(done.stdout.split()[-1]) / size
            at_most = AT_MOST if way == WAYS[0] else None
            report.target(f"{way}: peak of the host's memory / the model", found, at_most=at_most)
    report.publish()


def write(folder: Path, blocks: int, width: int) -> None:
    """Write shards and their index."""
    names = {f"blocks.{k}.weight": f"model-{k}.safetensors" for k in range(blocks)}
    for name, file in names.items():
        save_file({name: torch.randn(width, width)}, folder / file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(way: str, folder: Path, blocks: int, width: int) -> int:
    """By how many bytes the peak of this process is more than before."""
    before = peak()
    if way == "joined":
        model = Model(blocks, width)
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state |= load_file(file)
        model.load_state_dict(state)
    else:
        with torch.device("meta"):
            model = Model(blocks, width)
        load_pretrained(model, folder)
    half = blocks // 2
    GPipe(model, [half, blocks - half], module="blocks", devices=["cpu"] * 2).close()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return peak() - before


def peak() -> int:
    """The most memory that the process ever had, in bytes."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else 1024 * found


if __name__ == "__main__":
    main()

"""Builds the library once per version of torch and state of its source, into the environment."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "csrc"
# The source includes internal headers of torch, which change from one minor version to the next.
TORCH = "2.13."


class UnavailableError(Exception):
    """There can be no simulated GPUs here; the message says why."""


def library(into: Path | None = None) -> Path:
    """The path of the library, which is built if it is not there.

    Several processes may call this at once.

    Args:
        into: The folder of the library; by default one in the Python environment.

    Raises:
        UnavailableError: If it cannot be built for this torch, or not here.
    """
    torch = torch_folder()
    into = into or Path(sys.prefix) / "simulated_gpus"
    path = into / f"{version('torch')}-{_hash()}.so"
    if path.exists():
        return path
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            built = Path(scratch) / path.name
            _compile(torch, built)
            built.replace(path)  # whole, or not at all
    except OSError as error:
        raise UnavailableError(f"{into} cannot be written to ({error})") from error
    return path


def torch_folder() -> Path:
    """The folder of torch, if it is one to simulate GPUs with; it is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise UnavailableError("torch is not installed")
    try:
        found = version("torch")
    except PackageNotFoundError as error:
        raise UnavailableError("torch is not installed as a package") from error
    if not found.startswith(TORCH):
        raise UnavailableError(f"they are written for torch {TORCH}*, this is torch {found}")
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError("this torch is built for CUDA; its own devices cannot be replaced")
    if not (folder / "lib" / "libtorch_cpu.so").exists():
        raise UnavailableError("they are made for Linux: this torch has no libtorch_cpu.so")
    return folder


def _hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCE.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(torch: Path, into: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("no compiler: g++ is not installed")
    lib = torch / "lib"
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra"]
    links = [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    source = SOURCE / "simulated_gpus.cpp"
    command = [compiler, *flags, f"-isystem{torch / 'include'}", str(source), "-o", str(into)]
    done = subprocess.run([*command, *links], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise UnavailableError(f"{compiler} could not build them:\n{done.stderr[-4000:]}")

"""Where a benchmark ran: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("lightning", "torchgpipe", "fairscale")


@cache
def machine() -> dict[str, str]:
    """Processor, cores, memory and GPU."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "processor": _processor(),
        "cores": str(_cores()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        found["GPU"] = f"{torch.cuda.device_count()} x {properties.name}, {size}"
    return found


@cache
def versions() -> dict[str, str]:
    """Commit, Python, torch, and the other packages that are there."""
    found = {
        "commit": _commit(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cores() -> int:
    """Those that this process may use, or all where the system knows no such limit."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit, and whether the tree differs from it, the results apart."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

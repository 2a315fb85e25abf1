"""Runs the tests of processes with GPUs on real ones: ``python -m tests.gpu``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent
TESTS = [FOLDER / "test_cuda_processes.py", FOLDER / "test_cuda_channels.py"]


def missing() -> str:
    """What the tests need and is not here, or nothing."""
    if "SIMULATED_GPUS" in os.environ:
        return "real GPUs: SIMULATED_GPUS is set"
    if not dist.is_nccl_available():
        return f"torch with NCCL: this is torch {torch.__version__}"
    found = torch.cuda.device_count()
    return "" if found >= 2 else f"two GPUs: found {found}"


def main() -> int:
    """Run them, or say what is missing; return the exit status."""
    if need := missing():
        print(f"skipped, because processes over NCCL need {need}")
        return 0
    return int(pytest.main(["-m", "gpu", *map(str, TESTS)]))


if __name__ == "__main__":
    sys.exit(main())

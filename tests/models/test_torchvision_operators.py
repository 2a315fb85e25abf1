"""torchvision is imported beside a torch that its library of operators does not load into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OPS = '''
import torch

def box_iou(one, other):
    """Of intervals."""
    overlap = (torch.minimum(one[:, None, 1], other[None, :, 1])
               - torch.maximum(one[:, None, 0], other[None, :, 0])).clamp(min=0)
    lengths = one[:, 1] - one[:, 0]
    return overlap / (lengths[:, None] + lengths[None] - overlap)
'''
USE = """
import tests.models.torchvision_operators
import torch
from torchvision.extension import _has_ops

boxes = torch.tensor([[0.0, 10.0], [1.0, 11.0], [20.0, 30.0]])
kept = torch.ops.torchvision.nms(boxes, torch.tensor([0.1, 0.9, 0.5]), 0.5)
assert kept.tolist() == [1, 2], kept
assert _has_ops()
"""


def test_library_that_does_not_load(tmp_path: Path) -> None:
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "ops.py").write_text(OPS)
    (folder / "extension.py").write_text("def _has_ops():\n    return False\n")
    (folder / "_C.so").write_bytes(b"no library")

    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USE}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 0, run.stderr

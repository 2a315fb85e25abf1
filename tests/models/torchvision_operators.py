"""Lets torchvision be imported where its library of operators does not load.

torchvision's wheel on the package index is built for CUDA, and beside the CPU build of torch its
library does not load. torchvision allows for that, but for two operators: it registers how they act
on fake tensors, which needs their schemas. So ``import torchvision`` ends in "operator
torchvision::nms does not exist", and with it ``import lightning``, as torchmetrics imports
torchvision where it is installed.

This module defines what is missing, and computes the one of the two that detectors use. It must be
imported before Lightning: by pytest as ``-p tests.models.torchvision_operators``, by
``python -m tests.models`` first of all.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define_missing() -> None:
    """Define the schemas that torchvision needs, if its library does not."""
    spec = find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    for library in [file for folder in folders or () for file in Path(folder).glob("_C*.so")]:
        try:
            torch.ops.load_library(library)
        except OSError:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", _SCHEMA)
            torch.library.impl("torchvision::nms", "CPU", _suppress)
            extension = import_module("torchvision.extension")
            vars(extension)["_has_ops"] = lambda: (
                True
            )  # else it raises before it calls the operator


def _suppress(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes that overlap none with a higher score that is kept, the best first."""
    from torchvision.ops import box_iou

    overlap = box_iou(dets, dets) > iou_threshold
    kept: list[int] = []
    for k in scores.argsort(descending=True, stable=True).tolist():
        if not overlap[k, kept].any():
            kept.append(k)
    return torch.tensor(kept, dtype=torch.int64)


define_missing()

"""Make the Python part of torchvision importable with a build of torch for CPUs.

The package index has torchvision for CUDA only, and its compiled operators do not load without CUDA. Two of their
names are declared here, so that timm and Ultralytics import; `nms`, which Ultralytics calls in validation, is done
in Python. torchvision has a folder of its own, since other libraries would try to import it where they find it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the boxes to keep, the best first; a box that overlaps a better one too much goes."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order, kept = scores.argsort(descending=True, stable=True), []
    while len(order):
        best, rest = order[0], order[1:]
        kept.append(best)
        corner = torch.minimum(boxes[best, 2:], boxes[rest, 2:]) - torch.maximum(boxes[best, :2], boxes[rest, :2])
        common = corner.clamp(min=0).prod(1)
        order = rest[common / (areas[best] + areas[rest] - common) <= threshold]
    return torch.stack(kept) if kept else order


sys.path.append(str(Path(sys.prefix) / "vision"))
library = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    library.define(operator + _SCHEMA)
library.impl("nms", _nms, "CPU")

import torchvision.extension  # noqa: E402

torchvision.extension._has_ops = lambda: True  # `nms` is the only one that is called

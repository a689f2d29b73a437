"""Build inspections without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.runs.inspection import Inspection, InspectionInfo

CLASSES = ("cat", "dog", "owl")


def make_info(**changes: Any) -> InspectionInfo:
    values: dict[str, Any] = {
        "checkpoint": "best.pt",
        "digest": "ab" * 32,
        "step": 70,
        "epoch": 7,
        "raw": False,
        "part": "all",
        "dataset": "folder",
        "classes": CLASSES,
        "root": "/photos",
        "data": {"path": "/photos"},
        "fingerprints": {"val": {"names": "1", "labels": "2", "sizes": "3"}},
    }
    return InspectionInfo(**values | changes)


def make_inspection(
    probabilities: Sequence[Sequence[float]],
    labels: Sequence[int],
    parts: Sequence[int] | None = None,
    paths: Sequence[str] | None = None,
    **changes: Any,
) -> Inspection:
    """Return the inspection of images of CLASSES with these class probabilities, N x 3, and labels."""
    table, label = np.array(probabilities, np.float32), np.array(labels, np.int32)
    own = table[np.arange(len(label)), label]
    best = np.sort(table, 1)
    columns = {
        "part": np.array(parts if parts is not None else [1] * len(label), np.uint8),
        "index": np.arange(len(label)),
        "label": label,
        "predicted": table.argmax(1).astype(np.int32),
        "second": np.argsort(-table, 1, kind="stable")[:, 1].astype(np.int32),
        "probability": best[:, -1],
        "label_probability": own,
        "loss": -np.log(np.maximum(own, 1e-9)),
        "margin": best[:, -1] - best[:, -2],
    }
    return Inspection(make_info(**changes.pop("info", {})), columns, paths, **changes)

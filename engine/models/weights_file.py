"""The file that `model.weights` names, as far as it can be judged without torch."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config.schema import Config
from engine.utils.errors import Problem, did_you_mean


def weights_problems(config: Config) -> list[Problem]:
    """What is known to be wrong with `model.weights` before a run starts. A run that is resumed needs them no more."""
    weights = config.model.weights
    if weights is None or weights == "pretrained":
        return []
    wrong = weights_file_problem(Path(weights))
    return [Problem("model.weights", wrong)] if wrong else []


def weights_file_problem(path: Path) -> str | None:
    """Why a file cannot hold weights, None where it may."""
    try:
        if path.is_dir():
            inside = next(iter(sorted(path.glob("checkpoints/best.pt"))), None)
            return f"{path} is a folder; give a file" + (f", such as {inside}" if inside else "")
        if not path.exists():
            names = [each.name for each in path.parent.glob("*")] if path.parent.is_dir() else []
            return f"there is no file {path}{did_you_mean(path.name, names)}"
        if not os.access(path, os.R_OK):
            return f"{path} may not be read by this user"
        return f"{path} is empty" if path.stat().st_size == 0 else None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"

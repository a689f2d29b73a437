"""Check the file named by `model.weights` without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from engine.base.errors import Problem, did_you_mean
from engine.config.schema import Config


def weights_problems(config: Config) -> list[Problem]:
    """Return the problems of `model.weights` that are detectable before a run starts."""
    weights = config.model.weights
    if weights is None or weights == "pretrained":
        return []
    problem = weights_file_problem(Path(weights))
    return [problem] if problem else []


def weights_file_problem(path: Path) -> Problem | None:
    """Return why the file cannot contain weights, None if it may."""
    key = "model.weights"
    try:
        if path.is_dir():
            inside = next(iter(sorted(path.glob("checkpoints/best.pt"))), None)
            example = f", such as {inside}" if inside else ""
            return Problem(key, f"{path} is a folder; set model.weights to a file{example}", code="not-a-file")
        if not path.exists():
            names = [file.name for file in path.parent.glob("*") if file.is_file()] if path.parent.is_dir() else []
            return Problem(key, f"{path} does not exist{did_you_mean(path.name, names)}", code="not-found")
        if not os.access(path, os.R_OK):
            return Problem(key, f"{path} is not readable by this user", code="not-readable")
        return Problem(key, f"{path} is empty", code="damaged") if path.stat().st_size == 0 else None
    except OSError as error:
        return Problem(key, f"{path} cannot be read: {error.strerror}", code="not-readable")

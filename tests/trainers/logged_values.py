"""What a training script logged, in a file of its own: `test_trainers.py` compares it with what the readers found.

The scripts run in the environments of their trainers, so this module needs the standard library only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Between two values: a training of seconds grows often enough to be followed.
PAUSE_S = 0.4
SEED = 0


class LoggedValues:
    """The metrics and parameters of each run below a folder, by the name that the readers give to the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self._parameters: dict[str, dict[str, Any]] = {}

    def add(self, run: str, values: Mapping[str, Any], step: int) -> None:
        """Remember the values of a step, and wait for a moment."""
        metrics = self._metrics.setdefault(run, {})
        for name, value in values.items():
            metrics.setdefault(name, []).append((step, float(value)))
        time.sleep(PAUSE_S)

    def drop_from(self, run: str, step: int) -> None:
        """Forget the values from a step on, which the script repeats."""
        for points in self._metrics.get(run, {}).values():
            points[:] = [point for point in points if point[0] < step]

    def add_parameters(self, run: str, parameters: Mapping[str, Any]) -> None:
        """Remember parameters that the readers should find."""
        self._parameters.setdefault(run, {}).update(parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return the curves, each a list of steps and values, and the parameters of each run."""
        return {
            run: {"metrics": metrics, "parameters": self._parameters.get(run, {})}
            for run, metrics in self._metrics.items()
        }


@contextmanager
def logged_values() -> Iterator[LoggedValues]:
    """Yield what the script fills. Its arguments are the folder of the logs and the file of the values."""
    folder, path = (Path(argument).absolute() for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    logged = LoggedValues(folder)
    yield logged
    path.write_text(json.dumps(logged.as_dict()))

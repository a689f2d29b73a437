"""Real trainers and the readers of foreign metrics: the curves and parameters that each logged are found.

`tests/trainers/build.sh FOLDER` builds the environments. `GPUTRAIN_TRAINERS=FOLDER pytest -m soak tests/trainers`
trains for seconds in each.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.watch.folders import ForeignRun, RunFollower, find_runs
from engine.watch.parameters import read_parameters

FOLDER = Path(__file__).parent
ENVIRONMENTS = os.environ.get("GPUTRAIN_TRAINERS", "")
# TensorBoard stores float32.
RELATIVE_TOLERANCE = 2**-23
Curves = dict[str, dict[int, float]]


def read(run: ForeignRun) -> tuple[Curves, dict[str, object]]:
    """Read all logs of a run that has ended, and return its curves and parameters."""
    curves: Curves = {}
    parameters = dict(read_parameters(run.folder))
    follower, is_read = RunFollower(run), False
    while not is_read:
        readings = follower.poll()
        is_read = all(reading.share == 1 for reading in readings)
        for reading in readings:
            assert not reading.problem
            parameters |= reading.parameters
            for name, points in curves.items() if reading.drop_from is not None else ():
                curves[name] = {step: value for step, value in points.items() if step < (reading.drop_from or 0)}
            for point in reading.points:
                curves.setdefault(point.name, {})[point.step] = point.value
    return curves, parameters


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("train_*.py")))
def test_curves_and_parameters_are_those_that_the_trainer_logged(name: str, tmp_path: Path) -> None:
    python = Path(ENVIRONMENTS, name, "bin", "python")
    if not ENVIRONMENTS or not python.exists():
        pytest.skip(f"no environment: tests/trainers/build.sh FOLDER {name}.py, GPUTRAIN_TRAINERS=FOLDER")
    logs, path = tmp_path / "logs", tmp_path / "values.json"
    command = [python, FOLDER / "logged_values.py", name, logs, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics, parameters = json.loads(path.read_text())
    runs = {run.name: run for run in find_runs(logs).runs}
    assert metrics and set(metrics) <= set(runs)
    for run, logged in metrics.items():
        curves, found = read(runs[run])
        for metric, values in logged.items():
            expected = {int(step): pytest.approx(value, rel=RELATIVE_TOLERANCE) for step, value in values.items()}
            assert curves.get(metric) == expected, f"{metric} of {run}"
        assert {key: found.get(key) for key in parameters.get(run, {})} == parameters.get(run, {})

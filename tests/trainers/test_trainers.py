"""Real trainers and the readers of foreign metrics: what each logged is found, equal, and soon after it is on disk.

`python tests/trainers/build.py --into FOLDER` builds the environments, and `GPUTRAIN_TRAINERS=FOLDER pytest -m soak -s
tests/trainers` trains for half a minute in each, and prints a row for each run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.foreign.folders import ForeignRun, RunFollower, find_runs
from engine.foreign.parameters import Parameters, read_parameters
from engine.foreign.reading import Reading
from support.trainers import SCRIPTS, TRAINERS, python_of

ENVIRONMENTS = os.environ.get("GPUTRAIN_TRAINERS")
POLL_S = 1.0
# The clock of what is on disk.
WATCH_S = 0.02
MAX_LIVE_S = 2.0
# TensorBoard stores float32.
RELATIVE_TOLERANCE = 2**-23
MAX_FAILED_LINES = 20

pytestmark = pytest.mark.soak


@dataclass
class Followed:
    """A run while it is followed: its curves by log, and how long its points were on disk before they were returned."""

    run: ForeignRun
    follower: RunFollower
    curves: list[dict[str, list[tuple[int, float]]]]
    # Of the first change of a file that may not have been read.
    position: int
    parameters: Parameters = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)
    live_s: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, run: ForeignRun, position: int) -> Followed:
        return cls(run, RunFollower(run), [{} for _ in run.logs], position)

    @property
    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        return {name: points for curves in self.curves for name, points in curves.items() if points}

    def poll(self, run: ForeignRun, changes: Changes) -> None:
        """Read what is new, and note for how long the oldest unread byte has been on disk."""
        position = len(changes.changes)
        unread_since = changes.first_since(self.position, run)
        readings = self.follower.poll()
        if any(reading.points for reading in readings) and unread_since is not None:
            self.live_s.append(time.monotonic() - unread_since)
        if all(reading.share == 1 for reading in readings):
            self.position = position
        for curves, reading in zip(self.curves, readings, strict=True):
            self._add(curves, reading)

    def _add(self, curves: dict[str, list[tuple[int, float]]], reading: Reading) -> None:
        if reading.drop_from is not None:
            for name, points in curves.items():
                curves[name] = [point for point in points if point[0] < reading.drop_from]
        for point in reading.points:
            curves.setdefault(point.name, []).append((point.step, point.value))
        self.parameters |= reading.parameters
        if reading.problem:
            self.problems[reading.problem] = None


class Changes:
    """When files below a folder were written, seen by a thread that looks at them all the time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: dict[Path, tuple[int, int, int]] = {}
        self._stopped = threading.Event()
        self.changes: list[tuple[Path, float]] = []

    @contextmanager
    def watched(self) -> Iterator[Changes]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            for path in list(self._folder.rglob("*")):
                try:
                    status = path.lstat()
                except OSError:
                    continue
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if status.st_size and path.is_file() and self._stamps.get(path) != stamp:
                    self._stamps[path] = stamp
                    self.changes.append((path, time.monotonic()))

    def first_since(self, position: int, run: ForeignRun) -> float | None:
        """Return when a log of a run was first written after a position in `changes`, None if it was not."""
        files = {path for log in run.logs for path in log.files}
        return next((when for path, when in self.changes[position:] if path in files), None)


def follow(process: subprocess.Popen[str], folder: Path) -> dict[str, Followed]:
    """Follow all runs below a folder until the process has ended and all is read."""
    followed: dict[str, Followed] = {}
    with Changes(folder).watched() as changes:
        is_last, before, position = False, 0, 0
        while not is_last:
            is_last = process.poll() is not None
            before, position = position, len(changes.changes)
            for run in find_runs(folder).runs:
                known = followed.get(run.name)
                if known is None or known.run.formats != run.formats:
                    followed[run.name] = Followed.begin(run, before)
                followed[run.name].poll(run, changes)
            if not is_last:
                time.sleep(POLL_S)
    return followed


def version_of(python: Path, package: str) -> str:
    program = f"from importlib import metadata; print(metadata.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def assert_same_curves(found: dict[str, list[tuple[int, float]]], logged: dict[str, Any]) -> None:
    for name, points in logged.items():
        assert [step for step, _ in found.get(name, [])] == [step for step, _ in points], name
        for (step, value), (_, expected) in zip(found[name], points, strict=True):
            is_equal = math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE) or math.isnan(value + expected)
            assert is_equal, f"{name} at {step}: {value} was logged as {expected}"


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.timeout(300)
def test_metrics_of_trainer_are_followed(name: str, tmp_path: Path) -> None:
    python = python_of(Path(ENVIRONMENTS or "", name))
    if not ENVIRONMENTS or not python.exists():
        pytest.skip(f"no environment: python tests/trainers/build.py {name} --into FOLDER, GPUTRAIN_TRAINERS=FOLDER")
    trainer = TRAINERS[name]
    logs, values, output = tmp_path / "logs", tmp_path / "values.json", tmp_path / "output.txt"
    with output.open("w") as file:
        command = [python, SCRIPTS / trainer.script, logs, values]
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True, cwd=tmp_path)
        followed = follow(process, logs)
    assert process.returncode == 0, "\n".join(output.read_text().splitlines()[-MAX_FAILED_LINES:])
    logged = json.loads(values.read_text())
    assert set(logged) <= set(followed)
    for run_name, expected in logged.items():
        found = followed[run_name]
        parameters = read_parameters(found.run.folder) | found.parameters
        print(
            f"\n| {name} | {version_of(python, trainer.package)} | {run_name} ({', '.join(found.run.formats)}) "
            f"| {len(found.metrics)} of {len(expected['metrics'])} metrics | {len(parameters)} parameters "
            f"| {len(found.live_s)} times, {max(found.live_s, default=math.nan):.2f} s |"
        )
        assert not found.problems
        assert_same_curves(found.metrics, expected["metrics"])
        assert {key: parameters.get(key) for key in expected["parameters"]} == expected["parameters"]
        assert max(found.live_s, default=math.inf) < MAX_LIVE_S

"""Real commands and `gputrain run -- COMMAND`: their curves, parameters and end are found, and nothing is left behind.

Needs the environments of `build.py`, as `test_trainers.py` does. `GPUTRAIN_COMMAND` is the `gputrain` to run, that of
the tests by default; with that of an installation without torch, only the trainers have torch. timm's train.py is no
part of its package: without FOLDER/timm/train.py it is skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.command.metric_files import command_metrics
from engine.foreign.folders import RunFollower
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import GPUTRAIN, Gputrain, isolated_gputrain, wait_for
from support.trainer_commands import COMMANDS, TRAINER_COMMANDS, TrainerCommand

ENVIRONMENTS = os.environ.get("GPUTRAIN_TRAINERS")
COMMAND = os.environ.get("GPUTRAIN_COMMAND", GPUTRAIN)
POLL_S = 0.1
MAX_LIVE_S = 2.0

pytestmark = pytest.mark.soak


@dataclass
class Typed:
    """A command in its own folder, and `gputrain` as it is typed there."""

    command: TrainerCommand
    gputrain: Gputrain
    cwd: Path
    found_s: dict[str, float] = field(default_factory=dict)
    """How long each metric file was there before its place was recorded."""
    live_s: list[float] = field(default_factory=list)
    """How old the times that the command prints were when they were in the record."""

    def line(self, *, is_long: bool, other: bool = False) -> list[str]:
        steps = self.command.steps * (100 if is_long else 1)
        text = self.command.line.replace("SCRIPTS", str(COMMANDS)).replace("STEPS", str(steps))
        text = text.replace("ENVIRONMENT", f"{ENVIRONMENTS}/{self.command.environment}")
        text = text.replace("PORT", str(_free_port()))
        return shlex.split(text.replace(self.command.changed, self.command.other) if other else text)

    def start(self, *options: str, is_long: bool) -> subprocess.Popen[str]:
        words = [COMMAND, "run", "--headless", *options, "--", *self.line(is_long=is_long)]
        # A pipe that nobody reads would fill.
        with (self.gputrain.folder / "output.txt").open("a") as file:
            process: subprocess.Popen[str] = self.gputrain.start(*words, cwd=self.cwd, stdout=file, stderr=file)
            return process

    @property
    def output(self) -> str:
        return (self.gputrain.folder / "output.txt").read_text()

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [COMMAND, *words], cwd=self.cwd, env=self.gputrain.environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def record(self, name: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self.gputrain.runs / name / "summary.json").read_text())
        except FileNotFoundError:
            return {}
        return record

    def curves(self, name: str) -> dict[str, int]:
        """Return the number of points of each curve of a run, as its screen shows them."""
        follower, counts = RunFollower(command_metrics(self.gputrain.runs / name, cwd=self.cwd)), Counter[str]()
        while True:
            readings = follower.poll()
            counts.update(point.name for reading in readings for point in reading.points)
            if all(reading.share == 1 for reading in readings):
                return dict(counts)

    def follow(self, name: str, process: subprocess.Popen[str]) -> None:
        """Note until the end of a command when its files and values are found."""
        seen: dict[Path, float] = {}
        clock = None
        while process.poll() is None:
            for path in self.cwd.rglob("*"):
                if path not in seen and _is_metric_file(path):
                    seen[path] = time.time()
            places = {path for log in command_metrics(self.gputrain.runs / name).logs for path in log.files}
            for path in places & seen.keys():
                self.found_s.setdefault(str(path), time.time() - seen[path])
            latest = self.record(name).get("metrics", {}).get("clock")
            if latest is not None and latest != clock:
                clock = latest
                self.live_s.append(time.time() - latest)
            time.sleep(POLL_S)

    def has_begun(self, name: str) -> bool:
        """Whether a run has what is found in its command: metrics, or output."""
        record = self.record(name)
        if self.command.metrics:
            return bool(record.get("metrics")) or record.get("train_loss") is not None
        log = self.gputrain.runs / name / "log.txt"
        return log.exists() and "Serving HTTP" in log.read_text()

    def left(self) -> list[str]:
        """Return what has the environment of this test, besides the test itself."""
        return [" ".join(process.cmdline()) for process in self.gputrain.processes()]


def _is_metric_file(path: Path) -> bool:
    is_named = path.suffix in (".csv", ".jsonl") or path.name.startswith(("events.out", "trainer_state"))
    try:
        return is_named and path.stat().st_size > 0
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(params=TRAINER_COMMANDS)
def typed(request: pytest.FixtureRequest, tmp_path: Path, gpu_host: FakeGpuHost) -> Iterator[Typed]:
    command = TRAINER_COMMANDS[request.param]
    programs = Path(sys.executable).parent
    if command.environment:
        folder = Path(ENVIRONMENTS or "", command.environment)
        if (
            not ENVIRONMENTS
            or not folder.exists()
            or ("ENVIRONMENT/" in command.line and not (folder / "train.py").exists())
        ):
            pytest.skip(f"no environment: python tests/trainers/build.py {command.environment} --into FOLDER")
        programs = folder / "bin"
    for gputrain in isolated_gputrain(tmp_path):
        cwd = tmp_path / "work"
        cwd.mkdir()
        if command.prepare is not None:
            command.prepare(cwd)
        # Trainers keep settings and caches there, and none asks a server. ultralytics has other folders under pytest.
        for name in [name for name in gputrain.environment if name.startswith("PYTEST_")]:
            del gputrain.environment[name]
        del gputrain.environment["CUDA_VISIBLE_DEVICES"]
        home = {"HOME": str(tmp_path / "home"), "YOLO_OFFLINE": "true", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        gputrain.environment |= home | {"PATH": f"{programs}:{os.environ['PATH']}"} | gpu_host.environment
        gpu_host.set_scene(gpu_line(0))
        yield Typed(command, gputrain, cwd)


@pytest.mark.timeout(400)
def test_command_is_followed_stopped_queued_detached_and_compared(typed: Typed, request: pytest.FixtureRequest) -> None:
    command, row = typed.command, dict[str, object]()
    if command.metrics:
        whole = typed.start("--gpus", "cpu", "--name", "whole", is_long=False)
        typed.follow("whole", whole)
        assert whole.returncode == 0, typed.output
        curves = typed.curves("whole")
        assert all(curves.get(name, 0) > 1 for name in command.metrics), curves
        row["curves"] = len(curves)

    # The second run waits for the GPU of the first one.
    first = typed.start("--gpus", "0", "--name", "first", is_long=True)
    wait_for(lambda: typed.has_begun("first") or first.poll() is not None, "metrics or output", 120)
    assert first.poll() is None, typed.output
    parameters = typed.record("whole" if command.metrics else "first")["command_parameters"]
    assert parameters | dict(command.parameters) == parameters
    row["parameters"] = len(parameters)
    options = ("--gpus", "0", "--queue", "--detach", "--name", "second")
    assert typed("run", *options, "--", *typed.line(is_long=True, other=True)) == "second\n"
    wait_for(lambda: typed.record("second")["state"] == "waiting", "the wait for the GPU")
    assert "second" in typed("queue")

    began = time.monotonic()
    typed("stop", "first")
    first.wait(60)
    row["stop"] = f"code {first.returncode} after {time.monotonic() - began:.1f} s"
    assert typed.record("first")["state"] == "stopped", typed.output

    wait_for(lambda: typed.has_begun("second"), "metrics or output of the detached run", 120)
    assert typed.record("second")["state"] == "running"
    row["detached"] = f"{len(typed('logs', 'second').splitlines())} lines"
    typed("stop", "second")
    assert typed.record("second")["state"] == "stopped"
    row["left"] = len(typed.left())
    wait_for(lambda: not typed.left(), f"the end of {typed.left()}", 5)

    if command.changed:
        compared = json.loads(typed("compare", "whole", "second", "--json"))["config"]
        assert any(before != after for before, after in compared.values()), compared
        row["compare"] = ", ".join(compared)
    row["found"] = ", ".join(f"{seconds:.1f} s" for seconds in typed.found_s.values())
    row["live"] = f"{max(typed.live_s):.1f} s" if typed.live_s else ""
    print(f"\n| {request.node.callspec.id} | " + " | ".join(f"{key} {value}" for key, value in row.items()) + " |")
    assert max([*typed.found_s.values(), *typed.live_s], default=0.0) < MAX_LIVE_S

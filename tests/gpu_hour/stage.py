"""A stage of the GPU hour: its steps, the machine they run on, and the two files they write.

A step is a function that returns rows. Each step runs in the process of its stage, which never touches CUDA: with a
context of its own, `--gpus free:1` would refuse the GPU. What needs CUDA is a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL_TIME = 3  # times the limit of a step on fake GPUs, which compute on the CPU
MIN_STEP_S = 5
NOT_RUN = "not run"
NO_TESTS = 5  # exit code of pytest
MAX_LISTED = 2000  # characters of an error in the files
KILL_S = 10  # for a killed process to end
# hooks/sitecustomize.py looks for the same name.
FAKE_CUDA_LIBRARY = "libfakecuda.so"
DESCRIBE_GPUS = """
import json, torch
gpus = torch.cuda.device_count()
names = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
print(json.dumps({"gpus": names, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}))
"""


class StepFailedError(Exception):
    """A command failed or a value is wrong; the message is its row."""


class StepSkippedError(Exception):
    """The machine lacks what the step needs; the message is its row."""


class OutOfTimeError(Exception):
    """The time of the stage is over; the next run of the stage continues with this step."""


@dataclass(frozen=True)
class Machine:
    """GPUs and software of the machine. `has_card` is False without a GPU and on the fake GPUs of the rehearsal."""

    gpus: list[str]
    has_card: bool
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    python: str
    cores: int

    @classmethod
    def describe(cls) -> Machine:
        answer = subprocess.run([sys.executable, "-c", DESCRIBE_GPUS], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise SystemExit(f"error: torch cannot describe the GPUs: {last_line(answer.stderr)}")
        found = json.loads(answer.stdout.splitlines()[-1])
        return cls(
            **found,
            has_card=bool(found["gpus"]) and FAKE_CUDA_LIBRARY not in os.environ.get("LD_PRELOAD", ""),
            driver=driver_version(),
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)),
        )

    def __str__(self) -> str:
        names = {name: self.gpus.count(name) for name in self.gpus}
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
        if self.gpus and not self.has_card:
            gpus += " (simulated on the CPU: times and ratios mean nothing)"
        software = [f"driver {self.driver}", f"torch {self.torch}", f"NCCL {self.nccl}", f"Python {self.python}"]
        return ", ".join([gpus, *(part for part in software if "None" not in part), f"{self.cores} cores"])


def driver_version() -> str | None:
    answer = subprocess.run(gputrain_command("gpus", "--json"), capture_output=True, text=True, check=False)
    value = json.loads(answer.stdout)["driver"]["value"] if answer.returncode == 0 else None
    return None if value is None else str(value)


def gputrain_command(*arguments: str) -> list[str]:
    """The command without its script; `__main__.py` puts the source tree on the path of all processes."""
    return [sys.executable, "-m", "tui", *arguments]


@dataclass(frozen=True)
class Row:
    """One line of the table; `figures` are its values for programs."""

    measurement: str
    result: str
    figures: dict[str, Any] = field(default_factory=dict)
    state: str = "ok"


@dataclass(frozen=True)
class Step:
    """A function of a stage, and what it needs. `limit_s` bounds the commands that it runs."""

    title: str
    function: Callable[[Context], list[Row]]
    limit_s: float
    gpus: int = 1
    card: bool = False


@dataclass
class Context:
    """What a step works with: the machine, a folder of its own, and the time until which it and its stage may run."""

    machine: Machine
    folder: Path
    data: Path | None
    step_end: float
    stage_end: float

    def size(self, on_card: int, in_rehearsal: int) -> int:
        """The size of a measurement: fake GPUs compute on the CPU."""
        return on_card if self.machine.has_card else in_rehearsal

    def seconds_left(self) -> float:
        return max(min(self.step_end, self.stage_end) - time.monotonic(), 1.0)

    def run(self, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises StepFailedError or OutOfTimeError if it takes longer than it may."""
        arguments = list(map(str, command))
        process = subprocess.Popen(
            arguments,
            cwd=self.folder,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=self.seconds_left())
        except subprocess.TimeoutExpired as error:
            if self.stage_end < self.step_end:
                raise OutOfTimeError from error
            raise StepFailedError(f"no end within the time of this step: {' '.join(arguments[-6:])}") from error
        finally:
            kill_group(process)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def gputrain(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(gputrain_command(*arguments), **variables)

    def train(self, name: str, *arguments: str, **variables: str) -> Run:
        """Train a run to its end."""
        folder = f"--runs-dir={self.folder}"
        done = self.gputrain("run", "--headless", *arguments, "--name", name, folder, **variables)
        if done.returncode != 0:
            raise StepFailedError(f"gputrain run {name}: exit code {done.returncode}: {last_line(done.stderr)}")
        return Run(self.folder / name)

    def measure(self, program: str, *arguments: object) -> dict[str, Any]:
        """Run a program of this folder in a process of its own; return the JSON object that it prints last."""
        done = self.run([sys.executable, Path(__file__).with_name(program), *map(str, arguments)])
        if done.returncode != 0:
            raise StepFailedError(f"{program}: exit code {done.returncode}: {last_line(done.stderr)}")
        values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return values

    def test(self, file: str, expression: str) -> str:
        """Run the GPU tests of a file whose names match; return pytest's last line."""
        markers = "gpu" if self.machine.has_card else "gpu and not card"
        options = ["-q", "-p", "no:cacheprovider", "-m", markers, "-k", expression]
        options += ["--basetemp", str(self.folder / "tests")]
        done = self.run([sys.executable, "-m", "pytest", *options, str(ROOT / file)])
        if done.returncode == NO_TESTS:
            raise StepSkippedError("its tests need a real card")
        if done.returncode != 0:
            failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            raise StepFailedError("; ".join([last_line(done.stdout or done.stderr), *failures])[:MAX_LISTED])
        return last_line(done.stdout)

    @contextmanager
    def started(self, command: Sequence[str | Path], log: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command in a process group of its own, which is killed at the end of the block."""
        with (self.folder / log).open("w") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=self.folder,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_group(process)


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return content

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads its group, with the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that hangs in the driver does not end.
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")[:MAX_LISTED]


@dataclass
class Report:
    """The two files of a stage, rewritten after each step. An incomplete one is continued at the next run."""

    stage: str
    title: str
    machine: Machine
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    @classmethod
    def open(cls, stage: str, title: str, machine: Machine, folder: Path) -> Report:
        """Continue the report of an interrupted stage on the same machine, or begin a new one."""
        report = cls(stage, title, machine, folder)
        try:
            earlier = json.loads(report.path("json").read_text())
        except (OSError, ValueError):
            return report
        if not earlier["complete"] and earlier["machine"] == asdict(machine):
            # A step with a failed row is repeated as a whole.
            repeated = {row["step"] for row in earlier["rows"] if row["state"] in ("failed", NOT_RUN)}
            report.rows = [row for row in earlier["rows"] if row["step"] not in repeated]
        return report

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.stage}-{self.title}.{suffix}"

    def has(self, step: Step) -> bool:
        return any(row["step"] == step.title for row in self.rows)

    def add(self, step: Step, rows: Sequence[Row], seconds: float) -> None:
        self.rows += [{"step": step.title, **asdict(row), "seconds": round(seconds, 1)} for row in rows]
        self.write()

    def write(self) -> None:
        content = {"stage": self.stage, "title": self.title, "machine": asdict(self.machine)}
        content |= {"complete": self.complete, "rows": self.rows}
        lines = [
            f"# Stage {self.stage}: {self.title}",
            "",
            str(self.machine),
            "",
            "| | result | step took |",
            "|---|---|---|",
        ]
        for row in self.rows:
            mark = "" if row["state"] == "ok" else f"**{row['state']}**: "
            lines.append(f"| {cell(row['measurement'])} | {mark}{cell(row['result'])} | {row['seconds']:.0f} s |")
        self.replace("json", json.dumps(content, indent=1) + "\n")
        self.replace("md", "\n".join(lines) + "\n")

    def replace(self, suffix: str, text: str) -> None:
        path = self.path(suffix)
        new = path.with_suffix(f".{suffix}.new")
        new.write_text(text)
        new.replace(path)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def run_stage(report: Report, steps: Sequence[Step], work: Path, data: Path | None, end: float) -> bool:
    """Run the missing steps until `end` of the monotonic clock; return whether all ran and none failed."""
    report.write()
    for number, step in enumerate(steps):
        if report.has(step):
            continue
        # An interrupted step may have left a run of the same name.
        folder = work / report.stage / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{report.stage}: {step.title} ...", flush=True)
        began = time.monotonic()
        limit_s = step.limit_s * (1 if report.machine.has_card else REHEARSAL_TIME)
        rows = run_step(step, Context(report.machine, folder, data, began + limit_s, end))
        report.add(step, rows, time.monotonic() - began)
        for row in rows:
            print(f"   {row.measurement}: {'' if row.state == 'ok' else row.state + ': '}{row.result}", flush=True)
    report.complete = all(row["state"] != NOT_RUN for row in report.rows)
    report.write()
    return report.complete and all(row["state"] != "failed" for row in report.rows)


def run_step(step: Step, context: Context) -> list[Row]:
    """Run a step if the machine has what it needs; errors become its row, because the other steps are worth as much."""
    found = len(context.machine.gpus)
    if found < step.gpus:
        needed = "a GPU, none" if step.gpus == 1 else f"{step.gpus} GPUs, {found}"
        return [Row(step.title, f"needs {needed} found", state="skipped")]
    if step.card and not context.machine.has_card:
        return [Row(step.title, "needs a real card; fake GPUs cannot show it", state="skipped")]
    try:
        if context.stage_end - time.monotonic() < MIN_STEP_S:
            raise OutOfTimeError
        return step.function(context)
    except OutOfTimeError:
        return [Row(step.title, "no time left; the next run of this stage begins here", state=NOT_RUN)]
    except StepSkippedError as reason:
        return [Row(step.title, str(reason), state="skipped")]
    except StepFailedError as error:
        return [Row(step.title, str(error), state="failed")]
    except Exception as error:
        return [Row(step.title, f"{type(error).__name__}: {error}"[:MAX_LISTED], state="failed")]

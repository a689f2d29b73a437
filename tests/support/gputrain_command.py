"""Run the installed `gputrain` command in its own folder and environment, and read its run folders.

Tests use it through the fixtures in conftest.py.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from engine.base.files import exclusive_lock

T = TypeVar("T")

ROOT = Path(__file__).parent.parent.parent
GPUTRAIN = str(Path(sys.executable).with_name("gputrain"))
LAUNCHER_VARIABLES = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMP_", "GPUTRAIN_")
RESERVATIONS_VARIABLE = "GPUTRAIN_RESERVATIONS"  # a run on real GPUs must see the reservations of other runs


def wait_for(condition: Callable[[], bool], description: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} s waiting for {description}"
        time.sleep(0.05)


def read_events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def read_failures(run: Path) -> list[tuple[int, str]]:
    """Return rank and code of each failure in the journal of a run."""
    return [(event["rank"], event["code"]) for event in read_events(run) if event["type"] == "rank_failed"]


def without_timings(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `epoch` and `step` events without fields that depend on the clock."""
    clocks = {"time", "seconds", "images_per_second", "data_wait", "rank_timings"}
    kept = [event for event in events if event["type"] in ("epoch", "step")]
    return [{key: value for key, value in event.items() if key not in clocks} for event in kept]


def effective_events(run: Path) -> list[dict[str, Any]]:
    """Return the events without those of steps that a resume repeats, as readers of the journal do."""
    kept: list[dict[str, Any]] = []
    for event in read_events(run):
        if event["type"] == "run_resumed":
            kept = [earlier for earlier in kept if earlier.get("step", 0) <= event["from_step"]]
        kept.append(event)
    return without_timings(kept)


def step_losses(run: Path) -> list[float]:
    return [loss for event in effective_events(run) if event["type"] == "step" for loss in event["losses"]]


def shown_state(gputrain: Gputrain, name: str) -> tuple[str, str]:
    """Return the state and the message that `runs show` prints of a run."""
    row = json.loads(gputrain("runs", "show", name, "--json").stdout)
    return row["state"], row["message"]


def last_checkpoint_weights(run: Path) -> dict[str, Any]:
    import torch

    weights: dict[str, Any] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]
    return weights


@dataclass
class Gputrain:
    """The `gputrain` command with its own runs folder and no visible GPUs."""

    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command and wait for its end."""
        environment = self.environment | variables
        command = [GPUTRAIN, *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start the command in the background."""
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = pipes | {"env": self.environment, "cwd": self.folder} | options
        command = list(arguments) if "/" in arguments[0] else [GPUTRAIN, *arguments]
        process = subprocess.Popen(command, text=True, **options)
        self.started.append(process)
        return process

    def run_in_mount_namespace(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script that may mount file systems; `"$@"` in it is the command with its arguments."""
        unshare = shutil.which("unshare")
        mount = [str(unshare), "-Urm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
        if unshare is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("unprivileged mount namespaces are not available")
        return subprocess.run(
            [unshare, "-Urm", "sh", "-c", script, "sh", GPUTRAIN, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def inject_fault(self, kind: str, rank: int, *steps: int, once: bool = False) -> None:
        """Add a fault (see hooks/faults.py) to all commands started from now on."""
        faults = json.loads(self.environment.get("GPUTRAIN_FAULT", "[]"))
        mark = str(self.folder / f"fault-{len(faults)}") if once else None
        faults.append({"kind": kind, "rank": rank, "steps": steps, "once": mark})
        self.environment["GPUTRAIN_FAULT"] = json.dumps(faults)

    def wait_for_event(self, name: str, kind: str, count: int = 1) -> None:
        """Wait until the run `name` has `count` events of type `kind`."""
        journal = self.runs / name / "events.jsonl"

        def has_enough() -> bool:
            return journal.exists() and sum(event["type"] == kind for event in read_complete_events(journal)) >= count

        wait_for(has_enough, f"{count} {kind} events of {name}", 200)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that have this test's environment."""
        matching = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("GPUTRAIN_TEST") == self.environment["GPUTRAIN_TEST"]
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    matching.append(process)
            except psutil.Error:
                continue
        return matching


def find_rank_starter(supervisor: subprocess.Popen[str], gputrain: Gputrain) -> psutil.Process | None:
    """Return the process that starts the ranks of a supervisor."""
    processes = gputrain.processes()
    return next(
        (
            process
            for process in processes
            if process.ppid() == supervisor.pid and "engine.jobs.launch.rank_starter" in str(process.cmdline())
        ),
        None,
    )


def find_rank_pids(supervisor: subprocess.Popen[str], gputrain: Gputrain) -> list[int]:
    starter = find_rank_starter(supervisor, gputrain)
    return [] if starter is None else [rank.pid for rank in children_that_are_ranks(starter)]


def children_that_are_ranks(starter: psutil.Process) -> list[psutil.Process]:
    """Return the children of a rank starter, without multiprocessing's resource tracker."""
    ranks = []
    for child in starter.children():
        # A child that is not a rank may exit before its command line is read.
        with suppress(psutil.NoSuchProcess):
            ranks += [child] if "resource_tracker" not in str(child.cmdline()) else []
    return ranks


def read_complete_events(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().split("\n")[:-1]]


def clean_environment(folder: Path) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key == RESERVATIONS_VARIABLE or not key.startswith(LAUNCHER_VARIABLES)
    }
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    return kept | {
        "GPUTRAIN_RUNS": str(folder / "runs"),
        "GPUTRAIN_TEST": str(folder),
        "XDG_CONFIG_HOME": str(folder / "settings"),
        "XDG_STATE_HOME": str(folder / "state"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmp" / "inductor"),
        "TMPDIR": str(folder / "tmp"),
        # Its sitecustomize.py does nothing unless a variable asks for it.
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "hooks"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
    }


def isolated_gputrain(folder: Path, mark: str | None = None) -> Iterator[Gputrain]:
    """Yield the command; afterwards, check that no processes or shared memory files remain.

    `mark` tells its processes from those of other commands in the same folder.
    """
    shared_memory = shared_memory_files()
    environment = clean_environment(folder)
    command = Gputrain(folder, environment | {"GPUTRAIN_TEST": mark or str(folder)})
    yield command
    for process in command.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    wait_for(lambda: not command.processes(), f"the end of {command.processes()}")
    new_files = shared_memory_files() - shared_memory
    # Tests that run at the same time create and remove files of their own.
    wait_for(lambda: not new_files & shared_memory_files(), f"the removal of {new_files} from /dev/shm")


def shared_memory_files() -> set[str]:
    """Names in /dev/shm that torch, multiprocessing and NCCL create; other programs may add and remove files."""
    return {
        path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch_", "psm_", "sem.", "nccl"))
    }


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its process with the output, and its folder."""

    process: subprocess.CompletedProcess[str]
    path: Path


class SharedGputrain(Gputrain):
    """The command in a folder that all xdist workers share."""

    def once(self, name: str, make: Callable[[Gputrain], T]) -> T:
        """Return what `make` returns. The first worker calls it and keeps the result for the others, which wait."""
        result = self.folder / f"{name}.pickle"
        with exclusive_lock(result.with_suffix(".lock")):
            if not result.exists():
                for command in isolated_gputrain(self.folder, mark=str(result)):
                    result.write_bytes(pickle.dumps(make(command)))
        made: T = pickle.loads(result.read_bytes())
        return made

    def train_once(self, name: str, *command: str) -> FinishedRun:
        """Run the training `name` to its end unless another worker did. Its command starts with a path."""

        def train(gputrain: Gputrain) -> FinishedRun:
            process = gputrain.start(*command)
            output, messages = process.communicate(timeout=200)
            done = subprocess.CompletedProcess(process.args, process.returncode, output, messages)
            return FinishedRun(done, self.runs / name)

        return self.once(name, train)

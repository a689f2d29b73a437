"""What a batch system does for gputrain: one class, see `engine.runs.batch.slurm`.

`engine.jobs.launch.submission` makes the request and submits it. `engine.runs.batch.states` asks what became of the
jobs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.base.errors import Problem, UsageError
from engine.base.exits import exit_status
from engine.base.text import printable

TOOL_TIMEOUT_SECONDS = 30.0
MAX_WORDS_CHARS = 300


class BatchError(UsageError):
    """A batch system cannot be asked, or refuses. The reason is a sentence without its period."""

    def __init__(self, reason: str) -> None:
        super().__init__([Problem("--on", reason, code="batch-system")])


class JobPhase(StrEnum):
    """How far a job is. CANCELLED: by a user. KILLED: by the batch system, as at a time limit or with a lost node."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def is_over(self) -> bool:
        """Whether the job never runs again."""
        return self not in (JobPhase.PENDING, JobPhase.RUNNING)


class JobState(NamedTuple):
    """State of a job. `words` are those of its batch system, with the reason, such as `pending (Resources)`.
    `started_at` is when a running job started, in Unix seconds."""

    phase: JobPhase
    words: str
    started_at: float = 0.0


@dataclass(frozen=True)
class JobRequest:
    """A job as a batch system gets it.

    It runs the lines of a shell `setup`, then the line `command`, in `folder`. `tasks_per_node` is how often each node
    runs that line, as one rank of a training; 0 runs it once, on the first node. `time_limit_min` is 0 without a limit,
    `gpus` and `cores` are those of a node, `options` further words for the batch system, as typed. The output goes to
    `log`. With `names_nodes`, it sets GPUTRAIN_NODES, their number, GPUTRAIN_HEAD, the first one, and GPUTRAIN_PORT.
    With `array_size`, it is an array of so many jobs, of which `array_limit` run at once; each sets GPUTRAIN_TASK to an
    ID of its own, that of the array with an underscore and more."""

    name: str
    folder: Path
    log: Path
    command: str
    setup: Sequence[str] = ()
    nodes: int = 1
    tasks_per_node: int = 0
    gpus: int = 0
    cores: int = 1
    time_limit_min: float = 0.0
    partition: str = ""
    options: Sequence[str] = ()
    names_nodes: bool = False
    array_size: int = 0
    array_limit: int = 1


class Engine(Protocol):
    """A batch system. Its methods raise BatchError."""

    job_variable: str
    """Environment variable that has the ID of the job in its processes."""
    requeues: bool
    """Whether a job has a time limit, and runs again after it."""
    rank_gpus: str
    """The GPUs that a rank selects which it starts; "" for those of the run, on each node."""

    def starts_ranks(self, nodes: int) -> bool:
        """Return whether the batch system starts the ranks of a training on this number of nodes itself."""

    def script(self, request: JobRequest) -> str:
        """Return the script of a job, which starts a run or continues it. Raises UsageError if the cluster lacks what
        it asks for."""

    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit the script of a request, and return the ID of its job."""

    def states(self, since: float | None) -> Mapping[str, JobState]:
        """Return the jobs of this user by their IDs: those that wait or run, and those that ended lately. With `since`,
        in Unix seconds, also those that were submitted since then, as far as the batch system keeps them. An array is
        one job."""

    def cancel(self, job: str) -> None:
        """End a job that waits or runs, so that its processes can save a checkpoint, and do not start again."""

    def per_node(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command that runs another one once on each node of the job."""


def run_tool(*argv: str, timeout_s: float = TOOL_TIMEOUT_SECONDS, ok_codes: Sequence[int] = (0,)) -> str:
    """Return what a command of a batch system prints. Raises BatchError, with its words, unless it ends in time with
    one of the exit codes."""
    try:
        done = subprocess.run(  # noqa: S603 (tools of the batch system, and no shell)
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise BatchError(f"there is no {argv[0]} on this host; the login nodes of a cluster have it") from error
    except OSError as error:
        raise BatchError(f"{argv[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BatchError(f"{argv[0]} did not answer within {timeout_s:g} s") from error
    if done.returncode not in ok_codes:
        lines = done.stderr.decode(errors="replace").split("\n")
        words = printable(" ".join(filter(None, map(str.strip, lines))))[:MAX_WORDS_CHARS]
        raise BatchError(f"{argv[0]}: {words}" if words else f"{argv[0]} {exit_status(done.returncode)}")
    return done.stdout.decode(errors="replace")

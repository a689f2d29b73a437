"""The supervisor of a run: it watches the ranks of a training or a command, and does for both what a run needs.

That is the start and the restarts, control requests and signals, the time limit, GPU readings, heartbeats, and the end,
with the requeue of its Slurm job (`run.requeue`). How events come and how a stop is asked is the business of a `Child`:
`ranks`, `program_run`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from engine.base.errors import Problem, UsageError
from engine.base.process import SignalHandler
from engine.config.limits import read_limits, time_limit
from engine.config.schema import Config
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.phases import Ended, Recording, Unrecorded
from engine.runs.batch.engine import BatchError, run_tool
from engine.runs.control import ControlRequest
from engine.runs.events import ControlEvent, GpuEvent, RunFinished, WarningEvent
from engine.runs.ownership import RunFolderGoneError

EndT = TypeVar("EndT", covariant=True)
ResultT = TypeVar("ResultT")


class Started(Protocol[EndT]):
    """One start of a child. Its processes end with `close` at the latest."""

    tick_s: float
    """How often `tick` is called, in seconds."""

    def goes_on(self) -> bool:
        """Return whether the child has not ended, and need not be ended."""

    def wait(self, until: float) -> float:
        """Wait for what the child says until a monotonic time at most, and emit it. Return when to tick next."""

    def tick(self, usage: GpuEvent | None) -> None:
        """Do what is due, after a reading of the GPUs if there is a new one. Must not block."""

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""

    def serve(self, request: ControlRequest, *, is_second: bool) -> str:
        """Carry out a control request, and return its outcome. `is_second`: a stop was requested before."""

    def kill(self) -> None:
        """End the child without a checkpoint."""

    def end(self) -> EndT:
        """End all processes, and return how the child ended. Raises UsageError if it refuses the config."""

    def close(self) -> None:
        """Release what the start holds."""


class Child(Protocol[ResultT]):
    """What a run starts, and again after a failure."""

    is_program: bool
    """Whether it is a program of somebody else: it may use other GPUs than those of the run, and is asked to stop, and
    not ended, when the run folder was moved or deleted."""
    pause_s: float
    """Seconds before a restart, at most 1: the heartbeat of the run stands still meanwhile."""

    def start(self, usage: GpuUsagePoller) -> Started[ResultT]:
        """Start the processes. Raises UsageError."""

    def restart_reason(self, result: ResultT) -> WarningEvent | None:
        """Record a failure after which the child restarts, and return its warning, without the number of the restart;
        None if the child does not restart."""

    def finish(self, result: ResultT, signals: SignalHandler, requeue: Callable[[], str]) -> int:
        """Record how the run ended, and return the exit code. A run that was stopped calls `requeue`."""


def supervise(run: Unrecorded, child: Child[ResultT]) -> Ended:
    """Run a child to its end, restart it if it fails, and record how the run ended.

    Raises UsageError if it cannot be started, and OwnershipLostError."""
    restart = 0
    usage = GpuUsagePoller(run.gpus if isinstance(run, Recording) else [], processes=child.is_program)
    supervisor = Supervisor(run, child, usage)
    supervisor.signals.install()
    try:
        result = supervisor.run_once()
        while restart < run.max_restarts and (warning := child.restart_reason(result)) is not None:
            restart += 1
            message = f"{warning.message} (restart {restart} of {run.max_restarts})"
            run.emit(WarningEvent(message=message, code=warning.code))
            time.sleep(child.pause_s)
            # Without a pause, the next start serves the request.
            if child.pause_s and supervisor.signals.is_set:
                break
            result = supervisor.run_once()
        return Ended(child.finish(result, supervisor.signals, supervisor.requeue))
    except UsageError as error:
        if restart > 0:
            run.emit(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()


class Supervisor:
    """Supervises the starts of a child, which share the time limit."""

    def __init__(self, run: Unrecorded, child: Child[Any], usage: GpuUsagePoller) -> None:
        self._run, self._child, self._usage = run, child, usage
        self.signals = SignalHandler()
        self._limit_min, self._limit = time_limit(read_limits().hours, run.settled.used)
        self._began = time.monotonic()

    def run_once(self) -> Any:
        """Start the child, and run it to its end. Raises as `supervise` does."""
        started, next_tick = self._child.start(self._usage), 0.0
        try:
            while True:
                # At least once: a child that ends at once is restarted, which a stop request must end.
                self._serve_signals(started)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + started.tick_s
                    self._tick(started)
                if not started.goes_on():
                    return started.end()
                next_tick = started.wait(next_tick)
        finally:
            started.close()

    def requeue(self) -> str:
        """Requeue the Slurm job of the run if its time limit is near. Return what became of it, as a last clause."""
        wanted = self._run.settled.used.run.requeue and self.signals.time_limit_near and not self.signals.kill_requested
        return requeue_clause() if wanted else ""

    def _tick(self, started: Started[Any]) -> None:
        if (usage := self._usage.poll()) is not None:
            self._run.emit(usage)
        started.tick(usage)
        try:
            self._run.keep_alive()
        except RunFolderGoneError as error:
            if not self._child.is_program:
                raise
            # The command may save what it has. The journal is open, and ends in the folder that was moved.
            if not self.signals.is_set:
                self._run.emit(WarningEvent(message=str(error), code=error.code))
                self.signals.request_stop("gputrain, whose run folder is gone")
        if self._limit_min and time.monotonic() - self._began > 60 * self._limit_min:
            self.signals.request_stop(self._limit)
        # Requests that wait together are one: a suspended supervisor may find that of an impatient script twice.
        is_second = started.is_stopping
        for request in self._run.requests():
            self._serve(started, request, is_second=is_second)

    def _serve(self, started: Started[Any], request: ControlRequest, *, is_second: bool = False) -> None:
        outcome = started.serve(request, is_second=is_second)
        self._run.emit(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    def _serve_signals(self, started: Started[Any]) -> None:
        if self.signals.signal_name is not None and not started.is_stopping:
            self._serve(started, ControlRequest(request="stop", by=self.signals.signal_name))
        if self.signals.kill_requested:
            started.kill()


SCONTROL_TIMEOUT_SECONDS = 20  # less than Slurm's default KillWait of 30 s


def slurm_job_id() -> str | None:
    """Return the ID of the Slurm job that this process runs in; None outside of Slurm.

    The last job of an array has the number of the array, which would requeue all of them."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    array = [value for name in names if (value := os.environ.get(name, "")).isdigit()]
    job = os.environ.get("SLURM_JOB_ID", "")
    return "_".join(array) if len(array) == len(names) else job if job.isdigit() else None


def requeue_warnings(config: Config) -> list[Problem]:
    """Return that `run.requeue` has no effect, unless this process is in a Slurm job."""
    if not config.run.requeue or slurm_job_id() is not None:
        return []
    return [Problem("", "run.requeue=true has no effect: this is not a Slurm job", code="no-effect")]


def requeue_clause() -> str:
    """Requeue the Slurm job of this process, and return what became of it, behind a semicolon; "" outside of Slurm.

    Slurm then ends the processes of the job, and kills them after its `KillWait`: save everything else before."""
    if (job := slurm_job_id()) is None:
        return ""
    try:
        # Slurm ends the processes of the job, and scontrol is one of them.
        run_tool("scontrol", "requeue", job, timeout_s=SCONTROL_TIMEOUT_SECONDS, ok_codes=(0, -signal.SIGTERM))
    except BatchError as error:
        reason = error.problems[0].reason
        return f"; job {job} could not be requeued ({reason}); submit its script again to continue the run"
    return f"; job {job} is requeued"

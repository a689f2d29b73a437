"""The ranks of a training as the child of a run (`supervise`): their events, requests to them, failures, and the end.

A start goes through `RankStarter` and leaves no process behind. `external` shares what the terminal shows, and how the
end is recorded; `phases` asks whether a training goes on before it resumes it."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Pipe

from engine.base import codec
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.exit_codes import ExitCode
from engine.base.exits import describe_exit, oom_kill_count
from engine.base.process import SignalHandler, blocked_reason
from engine.base.text import pluralize
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.jobs.command.spec import has_command
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.phases import Recording, Unrecorded
from engine.jobs.launch.preflight import check_resumed_config
from engine.jobs.launch.rank_process import DUMP_TRACEBACK_SIGNAL
from engine.jobs.launch.rank_starter import RankStarter
from engine.jobs.launch.request import settle_config
from engine.jobs.queue.state import PENDING_STAGES, QueueStage
from engine.runs.control import REQUEST_NAMES, ControlRequest, RequestCounters
from engine.runs.event_lines import TrainingProgress, event_line
from engine.runs.events import ConfigRejected, Event, FlushJournal, GpuEvent, RankFailed, RunFinished, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History, has_stopped_early
from engine.runs.metrics import format_metric
from engine.runs.recorder import Listener, Recorder
from engine.runs.run_record import read_run_record
from engine.train.data.plan import uses_threads
from engine.train.distributed.aborts import abort_failure, read_log_tail
from engine.train.distributed.channel import FLUSH_ACK, RankConnection
from engine.train.distributed.failures import describe_failure, late_ranks, root_cause
from engine.train.distributed.node_plan import prepare_environment
from engine.train.distributed.watchdog import (
    Heartbeat,
    Heartbeats,
    Phase,
    Watchdog,
    describe_progress,
    describe_stall,
    lagging_ranks,
)
from engine.train.loop.job import Job, RunResult

TICK_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for the other ranks to report and exit after the first failure
SAVE_GRACE_SECONDS = 60.0  # more for a rank that is writing the checkpoint of an earlier step
STOP_TIMEOUT_SECONDS = 30.0  # without progress of any rank after a stop request, the run ends without a checkpoint
TRACEBACK_WAIT_SECONDS = 0.3  # time for a hung rank to write its traceback to the log


class Ranks:
    """The ranks of a training, which this process starts through rank starters."""

    is_program, pause_s = False, 0.0

    def __init__(self, run: Unrecorded, job: Job, starters: Iterator[RankStarter]) -> None:
        """`starters` are those of the first start and of the restarts."""
        self._run, self._job, self._starters = run, job, starters
        self.requests = RequestCounters()
        self._progress = ProgressReporter(run.granted.requested.listener)

    def start(self, usage: GpuUsagePoller) -> StartedRanks:
        """Start the ranks, with the state of the run at its last start."""
        prepare_environment(self._job.plan, os.environ)
        starter = next(self._starters)
        return StartedRanks(self._job, starter, self._run.emit, self.requests, self._progress)

    def restart_reason(self, result: RunResult) -> WarningEvent | None:
        run = self._run
        if not isinstance(run, Recording) or (failure := restart_after(result, run.recorder.history)) is None:
            return None
        run.emit(failure)
        where = "its last checkpoint" if run.folder.resumable else "the beginning"
        resumed = run.recorder.history.started is not None
        used = settle_config(self._job.config, run.folder, run.claimed.code, is_resumed=resumed).used
        self._job = replace(self._job, config=used, resumed=resumed)
        message = f"{describe_failure(failure)}; restarting from {where}"
        return WarningEvent(message=message, code="rank-failed")

    def finish(self, result: RunResult, signals: SignalHandler, requeue: Callable[[], str]) -> int:
        return end_training(self._run, result, requeue() if result.state in ("stopped", "killed") else "")


class StartedRanks:
    """One start of the ranks: forwards their events and requests to them, and detects failures."""

    tick_s = TICK_SECONDS

    def __init__(
        self,
        job: Job,
        starter: RankStarter,
        emit: Callable[[Event], None],
        requests: RequestCounters,
        progress: ProgressReporter,
    ) -> None:
        self._job, self._starter, self._emit, self._requests = job, starter, emit, requests
        self._progress = progress
        self._failures: dict[int, RankFailed] = {}
        self._problems: list[Problem] = []
        self._killed, self._kill_at = "", math.inf
        """Why the ranks were killed without a checkpoint, and when they are killed because one has failed."""
        self._heartbeats = Heartbeats(job.plan.local_world_size)
        self._watchdog = Watchdog(self._heartbeats, job.config.run.watchdog)
        self._stop_watchdog = Watchdog(self._heartbeats, STOP_TIMEOUT_SECONDS, exempt_phase=Phase.CHECKPOINT)
        self._initial_oom_kills = oom_kill_count()
        log = job.folder.log if job.folder else None
        self._log_start = log.stat().st_size if log is not None and log.exists() else 0
        pipes = [Pipe() for _ in range(job.plan.local_world_size)]
        starter.start_ranks(job, [theirs for _, theirs in pipes], self._heartbeats)
        self._connections = [RankConnection(mine) for mine, _ in pipes]
        if requests.paused:
            self._send("pause")

    def goes_on(self) -> bool:
        if not self._starter.alive() or self._killed:
            return False
        if self._requests.stop and self._stop_watchdog.expired() is not None:
            reason = f"no rank made progress for {STOP_TIMEOUT_SECONDS:g} s after the stop request"
            self._killed = f"{reason}, so no checkpoint was saved"
            return False
        if self._kill_at == math.inf and (heartbeats := self._watchdog.expired()) is not None:
            alive = {rank: heartbeats[rank] for rank in self._starter.alive()}
            lagging = lagging_ranks(alive or dict(enumerate(heartbeats)))
            self._report_stall(heartbeats, lagging, f"no progress for {self._watchdog.timeout_s:g} s (run.watchdog)")
            return False
        if self._kill_at == math.inf and (self._failures or self._problems):
            self._kill_at = time.monotonic() + GRACE_SECONDS
        # A failure of another rank need not cost a checkpoint that is being written.
        saves = any(self._heartbeats.is_saving(rank) for rank in self._starter.alive())
        return time.monotonic() <= self._kill_at + (SAVE_GRACE_SECONDS if saves else 0)

    def tick(self, usage: GpuEvent | None) -> None:
        self._progress.poll(self._heartbeats)

    @property
    def is_stopping(self) -> bool:
        return self._requests.stop

    def serve(self, request: ControlRequest, *, is_second: bool) -> str:
        """Send a request to all ranks, which count requests as `RequestCounters` does."""
        name, steps = request.request, request.steps
        outcome = self._requests.apply(name, steps)
        if name in REQUEST_NAMES:
            self._send(f"{name} {steps}" if name == "profile" else name)
        return outcome

    def _send(self, message: str) -> None:
        for connection in self._connections:
            connection.send(message)

    def kill(self) -> None:
        self._killed = "killed by a second SIGINT"

    def end(self) -> RunResult:
        if not self._killed:
            self._poll_ranks(TICK_SECONDS)
            # If ranks failed only because a collective timed out, the rank that they waited for has failed.
            heartbeats = self._heartbeats.read()
            if late := late_ranks(self._failures, heartbeats):
                self._report_stall(heartbeats, late, "a collective timed out")
        # DataLoader workers die with their rank.
        self._starter.kill()
        if self._killed:
            return RunResult("killed", reason=self._killed)
        raise_if_any(self._problems)
        if self._failures:
            failure = root_cause(list(self._failures.values()))
            pids = [str(self._starter.pids[rank]) for rank in self._starter.alive() if self._starter.pids]
            if pids:
                reason = f"; process {', '.join(pids)} cannot be killed and still holds its memory and its GPU"
                failure = codec.replace(failure, cause=failure.cause + reason, repeats=True)
            return RunResult("failed", failure)
        codes = map(self._starter.exit_code, range(self._job.plan.local_world_size))
        return RunResult("stopped" if ExitCode.STOPPED in codes else "finished")

    def close(self) -> None:
        self._starter.kill()
        for connection in self._connections:
            connection.close()
        self._heartbeats.close()

    def wait(self, until: float) -> float:
        self._poll_ranks(max(until - time.monotonic(), 0.0))
        return until

    def _poll_ranks(self, max_seconds: float) -> None:
        """Wait for messages of the ranks, handle them, and note the ranks that have died."""
        connections = [connection for connection in self._connections if connection.is_open]
        starter = [self._starter.fileno()] if self._starter.is_open else []
        mp_connection.wait([*(connection.fileno() for connection in connections), *starter], max_seconds)
        # Exits first: whatever a dead rank has written can then be read.
        self._starter.poll()
        codes = {rank: self._starter.exit_code(rank) for rank in range(self._job.plan.local_world_size)}
        for connection in connections:
            for event in connection.receive():
                self._handle_event(event)
                if isinstance(event, FlushJournal):
                    connection.send(FLUSH_ACK)
        if self._starter.failure is not None:
            self._handle_event(self._starter.failure)
        for rank, code in codes.items():
            expected = code in (ExitCode.FINISHED, ExitCode.STOPPED) or bool(self._problems)
            if code is not None and not expected and rank not in self._failures:
                self._failures[rank] = self._exit_failure(rank, code)

    def _exit_failure(self, rank: int, code: int) -> RankFailed:
        """Return the failure of a rank that has exited without reporting one."""
        device, log = self._job.plan.devices[rank], self._job.folder.log if self._job.folder else None
        if code == -signal.SIGABRT and log is not None:
            return abort_failure(rank, device, read_log_tail(log, self._log_start))
        out_of_memory = None if self._initial_oom_kills is None else oom_kill_count() != self._initial_oom_kills
        prefix = "the process that started the ranks exited: " if self._starter.died_early else ""
        end = describe_exit(code, oom_killed=out_of_memory, threaded=uses_threads(self._job.config))
        return RankFailed(rank=rank, device=device, cause=f"{prefix}{end}", code=end.code)

    def _report_stall(self, heartbeats: list[Heartbeat], lagging: list[int], problem: str) -> None:
        """Record the rank that the others wait for as failed, and write its traceback to the log."""
        pids, alive = dict(enumerate(self._starter.pids)), self._starter.alive()
        states = {rank: blocked_reason(pids[rank]) if rank in pids else "" for rank in lagging}
        # Of equally lagging ranks, the one whose process is blocked holds up the others.
        blamed = [rank for rank in lagging if states[rank]] or lagging
        for rank in blamed:
            if rank in pids and rank in alive:
                os.kill(pids[rank], DUMP_TRACEBACK_SIGNAL)
        time.sleep(TRACEBACK_WAIT_SECONDS)
        first = blamed[0]
        details = [describe_progress(heartbeats[first])]
        if states[first] or first in alive:
            details.append(states[first] or "its traceback is in the log")
        cause = describe_stall(problem, blamed, len(heartbeats), *details)
        self._failures[first] = RankFailed(
            rank=first, device=self._job.plan.devices[first], cause=cause, code="rank-hung"
        )

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, RankFailed):
            self._failures.setdefault(event.rank, event)
        elif isinstance(event, ConfigRejected):
            self._problems = self._problems or event.problems
        else:
            self._emit(event)


MIN_INTERVAL_SECONDS = 0.25


class ProgressReporter:
    """Emits `TrainingProgress` to a listener after a step that all ranks of these heartbeats have completed."""

    def __init__(self, listener: Listener, min_interval_s: float = MIN_INTERVAL_SECONDS) -> None:
        self._listener, self._min_interval_s = listener, min_interval_s
        self._step, self._next_time = 0, 0.0

    def poll(self, heartbeats: Heartbeats) -> None:
        step, now = min(heartbeat.step for heartbeat in heartbeats.read()), time.monotonic()
        if step != self._step and now >= self._next_time:
            self._step, self._next_time = step, now + self._min_interval_s
            self._listener(TrainingProgress(step=step))


def stderr_listener(rank: int) -> Listener:
    """Return the listener of a rank without a journal: its events go to the launcher's log."""

    def print_line(event: Event) -> None:
        if (line := event_line(event)) is not None:
            print(f"rank {rank}: {line}", file=sys.stderr)

    return print_line


def check_resumed_training(folder: RunFolder, config: Config) -> Problem | None:
    """Return that a run has nothing left to do. Raises UsageError if it cannot go on with this config."""
    if has_command(folder):
        reason = "is the run of a command, which cannot go on as a training; use a new name with --name"
        raise UsageError.one(folder.name, reason, code="name-in-use")
    # The preflight checked this before the lock was held; the run may have changed since.
    check_resumed_config(config, folder)
    record = read_run_record(folder)
    # Reading all of a long journal takes seconds, so do so only if the run may have finished.
    may_be_done = record is None or record.state not in (RunState.STOPPED, RunState.FAILED)
    history = folder.history() if may_be_done else None
    if history is not None and history.state is RunState.FINISHED and is_complete(config.run, history):
        return _nothing_left(config.run, folder.name, len(history.epochs))
    return None


def _nothing_left(run: RunConfig, name: str, epochs: int) -> Problem:
    """Return why a finished run does not resume."""
    if epochs >= run.epochs:
        reason = f"{name} has already finished {pluralize(epochs, 'epoch')}"
        return Problem("", reason, f"set run.epochs to more than {epochs} to resume", code="already-finished")
    advice = f"set run.early_stop=0 or more than {run.early_stop} to resume"
    return Problem("", f"{name} has already stopped early after {epochs} epochs", advice, code="already-finished")


def is_complete(run: RunConfig, history: History) -> bool:
    """Whether a finished run has nothing left to train with this config."""
    return len(history.epochs) >= run.epochs or has_stopped_early(run, history)


def describe_early_stop(history: History) -> str:
    """Return that a finished run ended before its last epoch (`run.early_stop`), as a clause; "" if it did not."""
    if history.started is None or not history.epochs or history.epochs[-1].epoch >= history.started.epochs:
        return ""
    return f"stopped early after {history.epochs[-1].epoch} of {history.started.epochs} epochs (run.early_stop)"


def restart_after(result: RunResult, history: History) -> RankFailed | None:
    """Return the failure after which the ranks restart; None if it would recur, or if a stop was requested."""
    return None if result.failure is None or result.failure.repeats or history.stopping else result.failure


def end_training(run: Unrecorded, result: RunResult, suffix: str = "") -> ExitCode:
    """Record how the run ended, or show the failure of a dry run, and return the exit code."""
    failure = result.failure
    if not isinstance(run, Recording):
        if failure is not None:
            run.emit(RunFinished(state="failed", message=describe_failure(failure)))
        return ExitCode.FINISHED if result.state == "finished" else ExitCode.FAILED
    if failure is not None and run.place is not None and run.place.state.stage in PENDING_STAGES:
        # Else it would count as interrupted, and runs that wait for it would wait forever.
        run.place.save(stage=QueueStage.ENDED)
    return record_result(result, run.recorder, suffix)


def record_result(result: RunResult, recorder: Recorder, suffix: str = "") -> ExitCode:
    """Record how the run ended, and return the exit code."""
    name, resumable = recorder.folder.name, recorder.folder.resumable
    hint = f"resume with `gputrain resume {name}`" if resumable else "there is no checkpoint to resume from"
    if result.failure is not None:
        recorder.record(result.failure)
        recorder.record(RunFinished(state="failed", message=f"{describe_failure(result.failure)}; {hint}"))
        return ExitCode.FAILED
    if result.state == "finished":
        best = recorder.history.best
        parts = [describe_early_stop(recorder.history)]
        if best is not None:
            monitor, value = recorder.history.monitor, recorder.history.monitor.of_epoch(best)
            parts.append(f"{monitor.label} {format_metric(monitor, value or 0.0)} in epoch {best.epoch}")
        util = [mean for use in recorder.history.gpus.values() if (mean := use.mean("util")) is not None]
        parts += [f"GPU utilization {sum(util) / len(util):.0f}%"] if util else []
        recorder.record(RunFinished(state="finished", message="; ".join(filter(None, parts))))
        return ExitCode.FINISHED
    reason = f"{result.reason}; " if result.reason else ""
    recorder.record(RunFinished(state="stopped", message=reason + hint + suffix))
    return ExitCode.STOPPED if resumable else ExitCode.FAILED

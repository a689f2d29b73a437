"""The supervisor of the ranks of one run: forwards their events, serves control requests, and detects failures.

`launcher` runs one per start of the ranks; it starts them through `RankStarter` and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Pipe

from engine.data.limits import uses_threads
from engine.distributed.aborts import abort_failure, read_log_tail
from engine.distributed.channel import FLUSH_ACK, RankConnection
from engine.distributed.failures import late_ranks, root_cause
from engine.distributed.watchdog import (
    Heartbeat,
    Heartbeats,
    Phase,
    Watchdog,
    describe_progress,
    describe_stall,
    lagging_ranks,
)
from engine.launch.rank_process import DUMP_TRACEBACK_SIGNAL
from engine.launch.rank_starter import RankStarter
from engine.runs.control import REQUEST_NAMES, RequestCounters, consume_requests
from engine.runs.events import ConfigRejected, ControlEvent, Event, FlushJournal, RankFailed
from engine.training.job import Job, RunResult
from engine.utils import codec
from engine.utils.errors import Problem, raise_if_any
from engine.utils.exit_codes import ExitCode
from engine.utils.exits import describe_exit, oom_kill_count
from engine.utils.process import SignalHandler, blocked_reason

TICK_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for the other ranks to report and exit after the first failure
SAVE_GRACE_SECONDS = 60.0  # more for a rank that is writing the checkpoint of an earlier step
STOP_TIMEOUT_SECONDS = 30.0  # without progress of any rank after a stop request, the run ends without a checkpoint
TRACEBACK_WAIT_SECONDS = 0.3  # time for a hung rank to write its traceback to the log


class Supervisor:
    """Supervises one start of the ranks.

    `emit` receives each event; `on_tick` is called with the heartbeats every `TICK_SECONDS` and must not block. Control
    requests arrive in the job's folder, if it has one; `requests` holds those of earlier starts."""

    def __init__(
        self,
        job: Job,
        starter: RankStarter,
        signals: SignalHandler,
        emit: Callable[[Event], None],
        on_tick: Callable[[Heartbeats], None],
        requests: RequestCounters,
    ) -> None:
        self._job, self._signals, self._emit, self._on_tick = job, signals, emit, on_tick
        self._starter = starter
        self._connections: list[RankConnection] = []
        self._failures: dict[int, RankFailed] = {}
        self._problems: list[Problem] = []
        self._requests = requests
        self._heartbeats = Heartbeats(job.plan.local_world_size)
        self._watchdog = Watchdog(self._heartbeats, job.config.run.watchdog)
        self._stop_watchdog = Watchdog(self._heartbeats, STOP_TIMEOUT_SECONDS, exempt_phase=Phase.CHECKPOINT)
        self._initial_oom_kills = oom_kill_count()
        log = job.folder.log if job.folder else None
        self._log_start = log.stat().st_size if log is not None and log.exists() else 0

    def run(self) -> RunResult:
        """Run the ranks until all have exited. Raises UsageError if they refuse the config."""
        try:
            self._start_ranks()
            kill_at: float | None = None
            while self._starter.alive():
                self._poll_ranks()
                self._on_tick(self._heartbeats)
                self._poll_requests()
                if self._signals.kill_requested:
                    return RunResult("killed", reason="killed by a second SIGINT")
                if self._requests.stop and self._stop_watchdog.expired() is not None:
                    reason = f"no rank made progress for {STOP_TIMEOUT_SECONDS:g} s after the stop request"
                    return RunResult("killed", reason=f"{reason}, so no checkpoint was saved")
                if kill_at is None and (heartbeats := self._watchdog.expired()) is not None:
                    alive = {rank: heartbeats[rank] for rank in self._starter.alive()}
                    lagging = lagging_ranks(alive or dict(enumerate(heartbeats)))
                    problem = f"no progress for {self._watchdog.timeout_s:g} s (run.watchdog)"
                    self._report_stall(heartbeats, lagging, problem)
                    break
                if kill_at is None and (self._failures or self._problems):
                    kill_at = time.monotonic() + GRACE_SECONDS
                # A failure of another rank need not cost a checkpoint that is being written.
                saves = any(self._heartbeats.is_saving(rank) for rank in self._starter.alive())
                if kill_at is not None and time.monotonic() > kill_at + (SAVE_GRACE_SECONDS if saves else 0):
                    break
            self._poll_ranks()
            # If ranks failed only because a collective timed out, the rank that they waited for has failed.
            heartbeats = self._heartbeats.read()
            if late := late_ranks(self._failures, heartbeats):
                self._report_stall(heartbeats, late, "a collective timed out")
        finally:
            # DataLoader workers die with their rank.
            self._starter.kill()
            for connection in self._connections:
                connection.close()
            self._heartbeats.close()
        raise_if_any(self._problems)
        if self._failures:
            failure = root_cause(list(self._failures.values()))
            pids = [str(self._starter.pids[rank]) for rank in self._starter.alive() if self._starter.pids]
            if pids:
                reason = f"; process {', '.join(pids)} cannot be killed and still holds its memory and its GPU"
                failure = codec.replace(failure, cause=failure.cause + reason, repeats=True)
            return RunResult("failed", failure)
        stopped = any(
            self._starter.exit_code(rank) == ExitCode.STOPPED for rank in range(self._job.plan.local_world_size)
        )
        return RunResult("stopped" if stopped else "finished")

    def _start_ranks(self) -> None:
        pipes = [Pipe() for _ in range(self._job.plan.local_world_size)]
        self._starter.start_ranks(self._job, [theirs for _, theirs in pipes], self._heartbeats)
        self._connections = [RankConnection(mine) for mine, _ in pipes]
        if self._requests.paused:
            for connection in self._connections:
                connection.send("pause")

    def _poll_ranks(self) -> None:
        """Wait up to `TICK_SECONDS` for messages of the ranks, handle them, and note the ranks that have died."""
        connections = [connection for connection in self._connections if connection.is_open]
        starter = [self._starter.fileno()] if self._starter.is_open else []
        mp_connection.wait([*(connection.fileno() for connection in connections), *starter], TICK_SECONDS)
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

    def _poll_requests(self) -> None:
        if self._job.folder is not None:
            for request in consume_requests(self._job.folder.control):
                self._forward_request(request.request, request.by, request.steps)
        if self._signals.signal_name is not None and not self._requests.stop:
            self._forward_request("stop", self._signals.signal_name)

    def _forward_request(self, request: str, by: str, steps: int = 0) -> None:
        """Send a request to all ranks, which count requests as `RequestCounters` does; `steps` are those of a
        profile."""
        outcome = self._requests.apply(request, steps)
        message = f"{request} {steps}" if request == "profile" else request
        if request in REQUEST_NAMES:
            for connection in self._connections:
                connection.send(message)
        self._emit(ControlEvent(request=request, by=by, outcome=outcome))

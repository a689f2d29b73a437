"""Owns one run from the spawn of its ranks to their end: passes their events on, asks them to stop, outlives their
faults, and leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Pipe

import psutil

from engine.distributed.channel import FLUSH_ACK, RankConnection
from engine.distributed.failures import root_cause
from engine.distributed.watchdog import Heartbeat, Heartbeats, Phase, Watchdog, describe_progress, lagging_ranks
from engine.launch.forkserver import ForkServer
from engine.launch.rank_process import DUMP_TRACEBACK_SIGNAL
from engine.runs.control import REQUEST_NAMES, RequestCounters, consume_requests
from engine.runs.events import ConfigRejected, ControlEvent, Event, FlushJournal, RankFailed
from engine.training.job import ExitCode, Job, RunResult
from engine.utils.errors import Problem, UsageError
from engine.utils.exits import describe_exit, oom_kill_count
from engine.utils.process import SignalHandler

TICK_SECONDS = 0.1
# So long the other ranks may take to tell of the fault that they saw, and to end of themselves.
GRACE_SECONDS = 1.0
# So long no rank may move once the run is to stop, before it is ended without another checkpoint.
STOP_TIMEOUT_SECONDS = 30.0
# So long a rank that stands still may take to write to the log where it stands.
TRACEBACK_WAIT_SECONDS = 0.3


class Supervisor:
    """The ranks of one run. `emit` takes each event for the journal; `on_tick` is called at every tick and must not
    block; requests come in through the job's folder, if it has one; `requests` holds the requests of earlier
    attempts."""

    def __init__(
        self,
        job: Job,
        fork_server: ForkServer,
        signals: SignalHandler,
        emit: Callable[[Event], None],
        on_tick: Callable[[], None],
        requests: RequestCounters,
    ) -> None:
        self._job, self._signals, self._emit, self._on_tick = job, signals, emit, on_tick
        self._fork_server = fork_server
        self._connections: list[RankConnection] = []
        self._failures: dict[int, RankFailed] = {}
        self._problems: list[Problem] = []
        self._requests = requests
        self._heartbeats = Heartbeats(job.plan.local_world_size)
        self._watchdog = Watchdog(self._heartbeats, job.config.run.watchdog)
        self._stop_watchdog = Watchdog(self._heartbeats, STOP_TIMEOUT_SECONDS, exempt_phase=Phase.CHECKPOINT)
        self._initial_oom_kills = oom_kill_count()

    def run(self) -> RunResult:
        """Raises UsageError where the ranks found that they cannot do what was asked for."""
        try:
            self._start_ranks()
            doomed: float | None = None
            while self._fork_server.alive():
                self._poll_ranks()
                self._on_tick()
                self._poll_requests()
                if self._signals.kill_requested:
                    return RunResult("killed", reason="killed by a second SIGINT")
                if self._requests.stop and self._stop_watchdog.expired() is not None:
                    why = f"no rank moved for {STOP_TIMEOUT_SECONDS:g} s after that"
                    return RunResult("killed", reason=f"{why}, so there is no checkpoint of the stop")
                if doomed is None and (heartbeats := self._watchdog.expired()) is not None:
                    self._report_stall(heartbeats)
                    break
                if doomed is None and (self._failures or self._problems):
                    doomed = time.monotonic() + GRACE_SECONDS
                if doomed is not None and time.monotonic() > doomed:
                    break
            self._poll_ranks()
        finally:
            self._kill()
            self._heartbeats.close()
        if self._problems:
            raise UsageError(self._problems)
        if self._failures:
            failure = root_cause(list(self._failures.values()))
            left = [str(self._fork_server.pids[rank]) for rank in self._fork_server.alive() if self._fork_server.pids]
            if left:
                why = f"; the kernel does not let process {', '.join(left)} end, which still holds what it had"
                failure = replace(failure, cause=failure.cause + why, repeats=True)
            return RunResult("failed", failure)
        stopped = any(
            self._fork_server.exit_code(rank) == ExitCode.STOPPED for rank in range(self._job.plan.local_world_size)
        )
        return RunResult("stopped" if stopped else "finished")

    def _start_ranks(self) -> None:
        pipes = [Pipe() for _ in range(self._job.plan.local_world_size)]
        self._fork_server.fork(self._job, [theirs for _, theirs in pipes], self._heartbeats)
        self._connections = [RankConnection(mine) for mine, _ in pipes]
        if self._requests.paused:
            for end in self._connections:
                end.send("pause")

    def _poll_ranks(self) -> None:
        """Wait a tick for news of any rank, take it, and note who has died."""
        open_ends = [end for end in self._connections if end.is_open]
        fork_server = [self._fork_server.fileno()] if self._fork_server.is_open else []
        mp_connection.wait([*(end.fileno() for end in open_ends), *fork_server], TICK_SECONDS)
        # Who is dead is asked first: what the dead have written is then all there to be read.
        self._fork_server.poll()
        codes = {rank: self._fork_server.exit_code(rank) for rank in range(self._job.plan.local_world_size)}
        for end in open_ends:
            for event in end.receive():
                self._handle_event(event)
                if isinstance(event, FlushJournal):
                    end.send(FLUSH_ACK)
        if self._fork_server.failure is not None:
            self._handle_event(self._fork_server.failure)
        for rank, code in codes.items():
            told = code in (ExitCode.FINISHED, ExitCode.STOPPED) or bool(self._problems)
            if code is not None and not told and rank not in self._failures:
                device = self._job.plan.devices[rank]
                out_of_memory = None if self._initial_oom_kills is None else oom_kill_count() != self._initial_oom_kills
                gone = "the process that forked the ranks is gone: " if self._fork_server.died_early else ""
                cause = gone + describe_exit(code, oom_killed=out_of_memory)
                self._failures[rank] = RankFailed(rank=rank, device=device, cause=cause)

    def _report_stall(self, heartbeats: list[Heartbeat]) -> None:
        """Whom the others wait for, with what its process does; the log gets the place in its code."""
        pids = dict(enumerate(self._fork_server.pids))
        alive = {rank: heartbeats[rank] for rank in self._fork_server.alive()}
        stuck = lagging_ranks(alive or dict(enumerate(heartbeats)))
        states = {rank: _blocked_reason(pids[rank]) if rank in pids else "" for rank in stuck}
        # Where all have come as far, one that the system does not let run is the one.
        held = [rank for rank in stuck if states[rank]] or stuck
        for rank in held:
            if rank in pids and rank in alive:
                os.kill(pids[rank], DUMP_TRACEBACK_SIGNAL)
        time.sleep(TRACEBACK_WAIT_SECONDS)
        limit = self._job.config.run.watchdog
        also = f"; so do ranks {', '.join(map(str, held[1:]))}" if len(held) > 1 else ""
        cause = (
            f"no step was made for {limit:g} s (run.watchdog), and the others wait for this rank: "
            f"{describe_progress(heartbeats[held[0]])}{also}{states[held[0]] or '; the log has the place in its code'}"
        )
        self._failures[held[0]] = RankFailed(rank=held[0], device=self._job.plan.devices[held[0]], cause=cause)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, RankFailed):
            self._failures.setdefault(event.rank, event)
        elif isinstance(event, ConfigRejected):
            self._problems = self._problems or [Problem(where, what) for where, what in event.problems]
        else:
            self._emit(event)

    def _poll_requests(self) -> None:
        if self._job.folder is not None:
            for request in consume_requests(self._job.folder.control):
                self._forward_request(request.request, request.by)
        if self._signals.signal_name is not None and not self._requests.stop:
            self._forward_request("stop", self._signals.signal_name)

    def _forward_request(self, request: str, by: str) -> None:
        """Every rank gets every request, and makes of them what `RequestCounters` does."""
        outcome = self._requests.apply(request)
        if request in REQUEST_NAMES:
            for end in self._connections:
                if end.is_open:
                    end.send(request)
        self._emit(ControlEvent(request=request, by=by, outcome=outcome))

    def _kill(self) -> None:
        """End whatever is left. Loader processes end with their rank."""
        self._fork_server.kill()
        for end in self._connections:
            if end.is_open:
                end.close()


def _blocked_reason(pid: int) -> str:
    """What keeps a process from running, in words; nothing where it runs or waits of itself."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    words = {psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: "it waits for a disk"}
    return f"; {words[status]}" if status in words else ""

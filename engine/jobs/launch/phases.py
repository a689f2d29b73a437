"""The steps of a run in the process that owns it: Requested → Claimed → Granted → Recording → Ended.

Each step is a function that takes one and returns the next. A run that waits for GPUs is claimed before they are
granted; any other one only once nothing refuses it, so that it leaves nothing behind. What a step acquires is released
by `Held`, and what it has to undo if the run ends before it starts stands beside it.

`launcher` begins them, for trainings (`training`) and commands (`program_run`); `external` does so in a rank that
torchrun or srun started.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.base import codec
from engine.base.errors import Problem, UsageError, file_errors
from engine.base.exit_codes import ExitCode
from engine.base.process import redirect_output
from engine.base.redaction import redact_argv
from engine.config.limits import read_limits
from engine.config.schema import Config
from engine.config.user_code import user_code_names
from engine.config.user_errors import code_root
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.jobs.command.inner_commands import argument_parameters
from engine.jobs.command.spec import write_command
from engine.jobs.launch.gpu_usage import local_gpu_ranks, waiting_emitter
from engine.jobs.launch.request import RunRequest, SettledConfig, check_dependencies, settle_config
from engine.jobs.launch.run_code import code_changed, record_code, stored_code
from engine.jobs.notify.run_messages import Outbox, RunMessages
from engine.jobs.notify.sender import send_logged
from engine.jobs.queue.dependencies import DependencyError, Predecessor
from engine.jobs.queue.place import CancelledError, QueuePlace, fixed_terms, initial_state
from engine.jobs.queue.state import PENDING_STAGES, Dependency, QueueStage
from engine.runs.batch.job import require_no_open_job
from engine.runs.control import ControlRequest, consume_requests
from engine.runs.event_lines import RunStarting
from engine.runs.events import Event, RunFinished, SessionStarted, WarningEvent
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder
from engine.runs.labels import change_labels
from engine.runs.ownership import ClaimedRun, claim_run
from engine.runs.recorder import Listener, Recorder
from engine.runs.run_record import read_run_record

if TYPE_CHECKING:
    from engine.jobs.code.record import CodeRecord

REFUSALS = (UsageError, DependencyError)


class AlreadyFinishedError(Exception):
    """The run to resume has nothing left to do."""


class EndedBeforeStartError(Exception):
    """A run with a place in the queue has ended before it started; its record says why."""

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__(f"ended with exit code {exit_code:d}")
        self.exit_code = exit_code


class RunListener:
    """Receives what a run shows, as long as its terminal is there."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, event: Event) -> None:
        self._listener(event)

    def leave_terminal(self, log: Path) -> None:
        """Show nothing any more, and write to a log what the process prints: whoever started the run may be gone."""
        with suppress(OSError):
            redirect_output(log)
        self._listener = lambda _: None


class Held:
    """What a run holds. However it ends, that is released in this order: journal, GPUs, messages, folder, processes."""

    def __init__(self) -> None:
        self._all = ExitStack()
        self.processes, self.folder, self.messages, self.gpus, self.journal = (
            self._all.enter_context(ExitStack()) for _ in range(5)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._all.__exit__(kind, error, traceback)


@dataclass(frozen=True)
class Requested:
    """A run with a settled request. It holds nothing yet."""

    request: RunRequest
    listener: RunListener
    held: Held


@dataclass(frozen=True)
class Claimed:
    """A run whose folder this process owns, and whose record it writes."""

    requested: Requested
    run: ClaimedRun
    code: CodeRecord | None
    recorder: Recorder
    messages: RunMessages

    @property
    def folder(self) -> RunFolder:
        return self.run.folder

    def keep_alive(self) -> None:
        """Renew the heartbeat of the run, and write what waits in memory. Raises OwnershipLostError."""
        self.run.ownership.renew_heartbeat()
        self.recorder.catch_up()


@dataclass(frozen=True)
class Queued:
    """A claimed run with a place in the queue: it waits, or it is detached and must not be lost before it starts."""

    claimed: Claimed
    place: QueuePlace


@dataclass(frozen=True)
class Granted:
    """A run with its GPUs. `queued` is its place if it has waited for them."""

    requested: Requested
    allocation: GpuAllocation
    queued: Queued | None
    warnings: tuple[WarningEvent, ...]
    """Those of the allocation, which were shown."""


@dataclass(frozen=True)
class Unrecorded:
    """A run that has begun without a record: a dry run, or a rank that torchrun or srun started, but rank 0."""

    granted: Granted
    settled: SettledConfig

    def emit(self, event: Event) -> None:
        """Show an event."""
        self.granted.requested.listener(event)

    def warn(self, problem: Problem) -> None:
        """Show a warning, and record it if the run is recorded."""
        self.emit(WarningEvent.of(problem))

    def keep_alive(self) -> None:
        """Renew what shows that the run lives. Raises OwnershipLostError."""
        self.granted.allocation.reservation.renew()

    def requests(self) -> Iterable[ControlRequest]:
        """Yield the control requests that have arrived; without a record, there are none."""
        return ()

    @property
    def max_restarts(self) -> int:
        """How often the run may start again after a failure."""
        return 0

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs of the run."""
        return [device.uuid for device in self.granted.allocation.devices]


@dataclass(frozen=True)
class Recording(Unrecorded):
    """A run that records what happens, whose ranks or command may start."""

    claimed: Claimed
    place: QueuePlace | None
    """Its place in the queue; None if it neither waited nor is detached."""
    is_resumed: bool
    """Whether a training has begun in its folder before."""

    @property
    def recorder(self) -> Recorder:
        return self.claimed.recorder

    @property
    def folder(self) -> RunFolder:
        return self.claimed.folder

    def emit(self, event: Event) -> None:
        """Record an event of the ranks, the command or the GPUs. Raises RunTakenOverError."""
        self.claimed.run.ownership.check_late()
        self.recorder.record(event)
        if isinstance(event, SessionStarted):
            self.claimed.run.keep()
            if self.place is not None:
                self.place.save(stage=QueueStage.STARTED)
            self.granted.allocation.reservation.publish_ranks(local_gpu_ranks(event))

    def keep_alive(self) -> None:
        super().keep_alive()
        self.claimed.keep_alive()

    def requests(self) -> Iterable[ControlRequest]:
        return consume_requests(self.folder.control)

    @property
    def max_restarts(self) -> int:
        return self.settled.used.run.max_restarts

    def check_code(self) -> None:
        """Record how the code differs at this start from that with which the run was made."""
        cwd, code, known = _code_folder(self.granted.requested.request), self.claimed.code, self.recorder.history.code
        is_recorded_now = self.place is None and self.claimed.run.is_new
        if cwd is None or is_recorded_now:
            return
        event = code_changed(code, self.folder, cwd, "" if known is None else known.changed)
        if event is not None:
            self.emit(event)


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and recorded how."""

    exit_code: int


def claim(requested: Requested, config: Config) -> Claimed:
    """Claim the folder of a run, and open its record. `config` is what it stores until it starts.

    Raises UsageError, and AlreadyFinishedError if the run has nothing left to do."""
    request, held, run = requested.request, requested.held, requested.request.config.run
    claimed = claim_run(
        request.runs_dir,
        run.name,
        request.default_name,
        resume=run.resume or run.requeue,
        agents=request.agents,
        trust_owner=request.trust_owner,
    )
    folder = claimed.folder
    held.folder.callback(claimed.ownership.release)
    held.folder.push(partial(_discard, claimed))
    if not claimed.is_new:
        _check_resumed(requested, folder)
    outbox = Outbox(lambda message: send_logged(folder, message, config.notify.urls))
    held.messages.callback(outbox.close)
    messages = RunMessages(folder, config, outbox)
    failure = f"{folder.path} cannot be written to"
    with file_errors("runs folder", failure, OTHER_RUNS_FOLDER_ADVICE, code="not-writable"):
        if request.command is not None:
            # Before the run waits: a reboot may interrupt that.
            write_command(folder, request.command)
        if tags := request.tags:
            change_labels(folder, lambda labels: labels.with_tags(tags))
        code, event = None, None
        if not claimed.is_new:
            code = stored_code(folder)
        elif (cwd := _code_folder(request)) is not None:
            code, event = record_code(folder, cwd, snapshot=run.snapshot)
        recorder = _make_recorder(
            requested, folder, settle_config(config, folder, None, is_resumed=False).stored, messages
        )
    held.journal.callback(recorder.close)
    if event is not None:
        # The terminal of a detached run becomes its log, which has the lines of all events.
        recorder.record(event, notify=not request.detached)
    return Claimed(requested, claimed, code, recorder, messages)


def _discard(claimed: ClaimedRun, _: object, error: BaseException | None, __: object) -> None:
    """Delete the folder of a run that is refused, or stopped, before it starts."""
    if isinstance(error, (*REFUSALS, KeyboardInterrupt)):
        claimed.discard()


def _check_resumed(requested: Requested, folder: RunFolder) -> None:
    """Raise UsageError if the run in a folder cannot go on with this request, and AlreadyFinishedError if it has
    nothing left to do, which is shown."""
    request = requested.request
    if (record := read_run_record(folder)) is not None:
        require_no_open_job(folder, record.state)
    if request.command is not None:
        from engine.jobs.launch.command_checks import check_resumed_command

        done = check_resumed_command(folder, request.command)
    else:
        from engine.jobs.launch.ranks import check_resumed_training

        done = check_resumed_training(folder, request.config)
    if done is not None:
        requested.listener(WarningEvent.of(done))
        raise AlreadyFinishedError


def _code_folder(request: RunRequest) -> Path | None:
    """Return the folder whose code the run uses; None for a training without user code, whose code is gputrain."""
    if request.command is not None:
        return Path(request.command.cwd)
    return code_root(request.config.run.code) if user_code_names(request.config) else None


def _make_recorder(requested: Requested, folder: RunFolder, config: Config, messages: RunMessages) -> Recorder:
    line, parameters = "", None
    if (command := requested.request.command) is not None:
        line, parameters = shlex.join(redact_argv(command.argv)), argument_parameters(command.argv)
    return Recorder(folder, config, requested.listener, command=line, parameters=parameters, follower=messages)


def enter_queue(claimed: Claimed, stage: QueueStage, dependencies: Sequence[Dependency] = ()) -> Queued:
    """Take a place in the queue, from which on a run leaves a record of why it does not start."""
    requested, request, folder = claimed.requested, claimed.requested.request, claimed.folder
    state = initial_state(
        folder,
        request.config,
        os.getpid(),
        # A sweep counts the failures of its trials itself.
        program="" if folder.sweep else request.default_name,
        cwd=str(request.runs_dir) if request.command is None else request.command.cwd,
        code="" if claimed.code is None else claimed.code.digests.fingerprint,
    )
    granted_at = time.time() if stage is QueueStage.GRANTED else None
    # A run whose wait was interrupted waits for the same runs, whose folders it knows.
    state = codec.replace(state, stage=stage, granted_at=granted_at, after=state.after or tuple(dependencies))
    place = QueuePlace(
        folder,
        state,
        fixed_terms(request.config),
        claimed.recorder,
        claimed.keep_alive,
        [Predecessor(request.runs_dir, dependency) for dependency in state.after],
        claimed.messages.hold,
    )
    if request.detached:
        requested.listener.leave_terminal(folder.log)
    place.save()
    queued = Queued(claimed, place)
    requested.held.journal.push(partial(_leave_queue, queued))
    return queued


def _leave_queue(queued: Queued, _: object, error: BaseException | None, __: object) -> None:
    """Record why a run with a place in the queue does not start, or delete that it had one.

    Raises EndedBeforeStartError if its folder stays for that."""
    place, claimed, request = queued.place, queued.claimed, queued.claimed.requested.request
    is_kept = request.detached or (place.has_waited and not claimed.run.is_new)
    if place.state.stage not in PENDING_STAGES or not isinstance(error, (*REFUSALS, CancelledError, KeyboardInterrupt)):
        return
    recorder, name = claimed.recorder, claimed.folder.name
    if isinstance(error, KeyboardInterrupt) and is_kept:
        # It stays as it is. A host that shuts down first sends SIGTERM to all processes.
        message = f"interrupted by a signal before it started; `gputrain queue resume {name}` starts it"
        recorder.record(WarningEvent(message=message, code="interrupted"))
        raise EndedBeforeStartError(ExitCode.FAILED) from error
    is_cancelled = isinstance(error, CancelledError)
    if is_cancelled or is_kept:
        recorder.record(RunFinished(state="stopped" if is_cancelled else "failed", message=str(error)))
    place.save(stage=QueueStage.ENDED)
    if is_cancelled or is_kept:
        is_stopped = is_cancelled and claimed.folder.resumable
        raise EndedBeforeStartError(ExitCode.STOPPED if is_stopped else ExitCode.FAILED) from error


def grant(requested: Requested, *, wait: bool) -> Granted:
    """Reserve the GPUs of a run. To `wait` for them, it claims its folder and takes a place in the queue.

    Raises UsageError, AlreadyFinishedError, and as `QueuePlace.poll_terms` does."""
    request, config, queued = requested.request, requested.request.config, None
    if wait and not request.dry_run:
        dependencies = check_dependencies(request)
        queued = enter_queue(claim(requested, config), QueueStage.WAITING, dependencies)
    allocation = allocate_devices(
        config.device.gpus,
        (config.run.name or request.default_name) if queued is None else queued.claimed.folder.name,
        wait=wait,
        on_wait=waiting_emitter(requested.listener) if queued is None else queued.place.report,
        poll_terms=(lambda: (fixed_terms(config), "")) if queued is None else queued.place.poll_terms,
        limits=read_limits(),
    )
    return grant_allocated(requested, allocation, queued)


def grant_allocated(
    requested: Requested, allocation: GpuAllocation, queued: Queued | None = None, *, shows_warnings: bool = True
) -> Granted:
    """Return a run with GPUs that were allocated for it, and show the warnings."""
    requested.held.gpus.callback(allocation.reservation.release)
    if queued is not None:
        queued.place.leave([device.uuid for device in allocation.devices])
    found = allocation.warnings if shows_warnings else []
    return Granted(requested, allocation, queued, tuple(show_warnings(requested, found, allocation.cpu_fallback)))


def record(granted: Granted, config: Config, warnings: Iterable[Problem]) -> Recording:
    """Claim the folder of a run unless it has waited there, and record what led to its start. `config` has what the
    preflight chose. Raises UsageError and AlreadyFinishedError."""
    requested, queued = granted.requested, granted.queued
    claimed = claim(requested, config) if queued is None else queued.claimed
    if queued is None and requested.request.detached:
        queued = enter_queue(claimed, QueueStage.GRANTED)
    folder, recorder, is_training = claimed.folder, claimed.recorder, requested.request.command is None
    # It may have waited until now.
    has_begun = any(folder.checkpoints.glob("*.pt")) or recorder.history.started is not None
    is_resumed = not claimed.run.is_new and has_begun
    settled = settle_config(config, folder, claimed.code, is_resumed=is_resumed, is_training=is_training)
    run = Recording(granted, settled, claimed, None if queued is None else queued.place, is_resumed)
    recorder.set_config(settled.stored)
    for warning in (*granted.warnings, *show_warnings(requested, warnings)):
        recorder.record(warning, notify=False)
    requested.listener(RunStarting(name=folder.name, folder=str(folder.path)))
    granted.allocation.reservation.set_run_name(folder.name)
    for problem in claimed.messages.warnings():
        run.warn(problem)
    return run


def show_warnings(
    requested: Requested, problems: Iterable[Problem], fallback: Problem | None = None
) -> list[WarningEvent]:
    """Show warnings before there is a journal, and return them."""
    warnings = [codec.replace(WarningEvent.of(each), cpu_fallback=each == fallback) for each in problems]
    for warning in warnings:
        requested.listener(warning)
    return warnings

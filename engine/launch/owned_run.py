"""A run in the process that owns it: its GPUs, its folder, its place in the queue, its record, and every way to end.

What starts in the run decides the rest: `lifecycle` trains a model, `command_run` runs the command of another program.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.config.limits import read_limits
from engine.config.schema import Config
from engine.gpus import sleeper
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.selection import CudaDevice
from engine.gpus.waiting import Bed, receive_signals, wake_up
from engine.launch.gpu_usage import local_gpu_ranks, waiting_emitter
from engine.launch.request import RunRequest, check_dependencies
from engine.launch.run_code import RunCode, code_changed, record_code, stored_code
from engine.notify.start import RunNotifier, send_held
from engine.queue.dependencies import DependencyError, FollowedRun
from engine.queue.place import CancelledError, QueuePlace, fixed_terms, initial_state
from engine.queue.state import Dependency, QueueStage, is_interrupted
from engine.runs.claimed_run import ClaimedRun, claim_run
from engine.runs.command_events import CommandStarted
from engine.runs.control import RequestCounters
from engine.runs.event_lines import RunStarting
from engine.runs.events import Event, GpuEvent, RunFinished, RunStarted, WarningEvent
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder
from engine.runs.labels import change_labels
from engine.runs.ownership import OwnershipLostError
from engine.runs.recorder import Listener, Recorder
from engine.utils import codec
from engine.utils.errors import UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.files import open_folder
from engine.utils.process import redirect_output


class AlreadyFinishedError(Exception):
    """The run to resume has nothing left to do."""


@dataclass
class OwnedRun:
    """What the owner of a run holds: GPUs, run folder and recorder. `release` releases all of it."""

    request: RunRequest
    listener: Listener
    allocation: GpuAllocation = field(default_factory=GpuAllocation)
    claimed: ClaimedRun | None = None
    recorder: Recorder | None = None
    requests: RequestCounters = field(default_factory=RequestCounters)
    place: QueuePlace | None = None
    """Its place in the queue, also after it has left it; None if it neither waited nor is detached."""
    code: RunCode = field(default_factory=RunCode)
    _started: bool = field(default=False, init=False)
    _early_warnings: list[WarningEvent] = field(default_factory=list, init=False)
    _early_usage: GpuEvent | None = field(default=None, init=False)
    _notifier: RunNotifier | None = field(default=None, init=False)
    _code_is_checked: bool = field(default=False, init=False)

    def show_gpu_warnings(self) -> None:
        """Show the warnings of the allocation."""
        fallback = self.allocation.cpu_fallback
        for problem in self.allocation.warnings:
            self.show_early_warning(codec.replace(WarningEvent.of(problem), cpu_fallback=problem == fallback))

    def show_early_warning(self, warning: WarningEvent) -> None:
        """Show a warning before there is a journal, which will contain it, too."""
        self._early_warnings.append(warning)
        self.listener(warning)

    def enter_queue(self) -> QueuePlace:
        """Claim the run folder and take a place in the queue, before the run has GPUs.

        Raises UsageError, and AlreadyFinishedError if the run has nothing left to do."""
        dependencies = check_dependencies(self.request)
        folder = self._claim_new().folder
        self.recorder = self.open_recorder(folder, with_run_name(self.request.config, folder))
        return self._take_place(QueueStage.WAITING, self.recorder, dependencies)

    def _take_place(self, stage: QueueStage, recorder: Recorder, dependencies: Sequence[Dependency] = ()) -> QueuePlace:
        folder, config = recorder.folder, self.request.config
        # A sweep counts the failures of its trials itself.
        program = "" if folder.sweep else self.request.default_name
        code = "" if self.code.record is None else self.code.record.digests.fingerprint
        state = initial_state(folder, config, os.getpid(), program, self._working_folder(), code)
        granted_at = time.time() if stage is QueueStage.GRANTED else None
        state = codec.replace(state, stage=stage, granted_at=granted_at)
        # A run whose wait was interrupted waits for the same runs, whose folders it knows.
        state = codec.replace(state, after=state.after or tuple(dependencies))
        followed = [FollowedRun.open(self.request.runs_dir, dependency) for dependency in state.after]
        self.place = QueuePlace(
            folder,
            state,
            fixed_terms(config),
            recorder,
            self.keep_alive,
            followed,
            lambda reason: send_held(folder, config, reason),
            # It slept: this process is the one that has entered the queue.
            waited_s=max(time.time() - state.submitted_at, 0.0) if self._was_owned else 0.0,
        )
        if self.request.detached:
            # From here on, whoever started it may be gone.
            with suppress(OSError):
                redirect_output(folder.log)
            recorder.listener = lambda _: None
            self.listener = lambda _: None
        self.place.save()
        return self.place

    @property
    def _was_owned(self) -> bool:
        return self.claimed is not None and self.claimed.ownership.was_owned

    def _working_folder(self) -> str:
        command = self.request.command
        return str(self.request.runs_dir) if command is None else command.cwd

    def allocate(self, *, wait: bool) -> Sequence[CudaDevice]:
        """Reserve the GPUs of the run, and the place in the queue while it waits for them.

        Raises UsageError, and as `QueuePlace.poll_terms` does."""
        config = self.request.config
        place = self.enter_queue() if wait and not self.request.dry_run else None
        receive_signals()
        self.allocation = allocate_devices(
            config.device.gpus,
            (config.run.name or self.request.default_name) if place is None else place.folder.name,
            wait=wait,
            on_wait=waiting_emitter(self.listener) if place is None else place.report,
            poll_terms=(lambda: (fixed_terms(config), "")) if place is None else place.poll_terms,
            limits=read_limits(),
            make_bed=self._make_bed if place is not None and self.request.detached and self.request.program else None,
        )
        if place is not None:
            place.leave([device.uuid for device in self.allocation.devices])
        self.show_gpu_warnings()
        return self.allocation.devices

    def _make_bed(self) -> Bed | None:
        """Return what the run sleeps with while it waits, None if it stays awake."""
        assert self.place is not None and self.claimed is not None and self.recorder is not None  # noqa: S101 - it waits
        request, folder = self.request, self.claimed.folder
        lock_fds = self.claimed.ownership.lock_fds
        if lock_fds is None or self.recorder.problem is not None:
            return None
        followed = [run.folder for run in self.place.followed if run.folder is not None]
        fds: list[int] = []
        with ExitStack() as opened:
            try:
                for each in (folder, *followed):
                    fds.append(open_folder(each.path))
                    opened.callback(os.close, fds[-1])
            except OSError:
                # It was moved or deleted just now.
                return None
            # Whether a run of an earlier gputrain or of another host lives is more than the small process finds out.
            if any(run.is_owned() and not sleeper.is_live(fd) for run, fd in zip(followed, fds[1:], strict=True)):
                return None
            opened.pop_all()
        flags = [
            *(["--trust-owner"] if request.trust_owner else []),
            *(["--trust-code"] if request.code_trust.granted else []),
        ]
        command = [*request.program, "resume", "--headless", "--detached", *flags, str(folder.path)]
        return Bed(command, fds[0], lock_fds, fds[1:])

    def claim(self, config: Config) -> ClaimedRun:
        """Claim the folder of the run, unless it has waited there. `config` is what it stores.

        Raises UsageError and AlreadyFinishedError."""
        claimed = self._claim_new() if self.claimed is None else self.claimed
        if self.request.detached and self.place is None:
            self.recorder = self.open_recorder(claimed.folder, with_run_name(config, claimed.folder))
            self._take_place(QueueStage.GRANTED, self.recorder)
        return claimed

    def _claim_new(self) -> ClaimedRun:
        """Claim the folder of the run, and record there what the request says. Raises as `claim` does."""
        request, run = self.request, self.request.config.run
        claimed = claim_run(
            request.runs_dir,
            run.name,
            request.default_name,
            resume=run.resume or run.requeue,
            agents=request.agents,
            trust_owner=request.trust_owner,
        )
        try:
            if not claimed.is_new:
                self.check_resumed(claimed.folder)
            self.store_request(claimed.folder)
        except (UsageError, AlreadyFinishedError):
            claimed.discard()
            claimed.ownership.release()
            raise
        self.claimed = claimed
        if tags := request.tags:
            change_labels(claimed.folder, lambda labels: labels.with_tags(tags))
        if not claimed.is_new:
            self.code = stored_code(claimed.folder)
        elif (cwd := self.code_folder) is not None:
            self.code = record_code(claimed.folder, cwd, snapshot=run.snapshot)
        return claimed

    def check_resumed(self, folder: RunFolder) -> None:
        """Check the run in a folder that is resumed. Raises UsageError if it cannot go on with this request, and
        AlreadyFinishedError if it has nothing left to do, which it also shows."""

    def store_request(self, folder: RunFolder) -> None:
        """Store what the run starts, if that is not in its config. Raises UsageError."""

    @property
    def code_folder(self) -> Path | None:
        """The folder whose code the run uses; None if it uses none of the user's."""
        return None

    def check_code(self) -> None:
        """Record how the code differs at this start from that with which the run was made."""
        was_checked, self._code_is_checked = self._code_is_checked, True
        if self.claimed is None or self.recorder is None or (cwd := self.code_folder) is None:
            return
        if self.code.event is not None and self.place is None and not was_checked:
            # It was recorded a moment ago.
            return
        known = self.recorder.history.code
        event = code_changed(self.code, self.claimed.folder, cwd, "" if known is None else known.changed)
        if event is not None:
            self.emit(event)

    def open_recorder(self, folder: RunFolder, config: Config) -> Recorder:
        """Return what records the run. Raises UsageError if the folder cannot be written to."""
        try:
            recorder = self._make_recorder(folder, config)
        except OSError as error:
            raise UsageError.one(
                "runs folder",
                f"{folder.path} cannot be written to: {error.strerror}",
                OTHER_RUNS_FOLDER_ADVICE,
                code="not-writable",
            ) from error
        warning = None if self.code.warning is None else WarningEvent.of(self.code.warning)
        for event in filter(None, (self.code.event, warning)):
            # The terminal of a detached run becomes its log, which has the lines of all events.
            recorder.record(event, notify=not self.request.detached)
        return recorder

    def _make_recorder(self, folder: RunFolder, config: Config) -> Recorder:
        return Recorder(folder, config, self.listener)

    def announce(self, folder: RunFolder, config: Config) -> None:
        """Open the journal, and show that the run starts with this config."""
        if self.recorder is None:
            self.recorder = self.open_recorder(folder, config)
        self.recorder.set_config(config)
        for warning in self._early_warnings:
            self.recorder.record(warning, notify=False)
        self.listener(RunStarting(name=folder.name, folder=str(folder.path)))
        self.allocation.reservation.set_run_name(folder.name)
        self._start_notifier(folder, config)

    def _start_notifier(self, folder: RunFolder, config: Config) -> None:
        """Start to send messages about the run."""
        if self._notifier is not None:
            return
        waited_s = 0.0 if self.place is None else self.place.waited_s
        gpus = [device.uuid for device in self.allocation.devices]
        self._notifier = RunNotifier(folder, config, waited_s=waited_s, gpus=gpus)
        for warning in self._notifier.warnings:
            self.emit(WarningEvent.of(warning))

    def emit(self, event: Event) -> None:
        """Record an event of the ranks or of their GPUs; a dry run only shows it.

        A GPU sample that precedes the start is recorded behind it, because it belongs to the session that starts.
        Raises RunTakenOverError.
        """
        if isinstance(event, GpuEvent) and not self._started:
            self._early_usage = event
            return
        if self.claimed is not None:
            self.claimed.ownership.check_late()
        (self.listener if self.recorder is None else self.recorder.record)(event)
        if not isinstance(event, RunStarted | CommandStarted):
            return
        self._started = True
        if self.claimed is not None:
            # The folder now contains a started run, which `discard` must keep.
            self.claimed.is_new = False
            if self.place is not None:
                self.place.save(stage=QueueStage.STARTED)
            self.allocation.reservation.publish_ranks(local_gpu_ranks(event))
        if self._early_usage is not None:
            self.emit(codec.replace(self._early_usage, time=event.time))
            self._early_usage = None

    def keep_alive(self) -> None:
        """Renew the heartbeats of the run and of its GPU reservation. Raises OwnershipLostError."""
        self.allocation.reservation.renew()
        if self.claimed is not None:
            self.claimed.ownership.renew_heartbeat()
        if self.recorder is not None:
            self.recorder.catch_up()

    @property
    def is_kept(self) -> bool:
        """Whether the folder of a run that ends before it starts stays, with the reason."""
        if self.place is None or self.claimed is None or self._started:
            return False
        return self.request.detached or (self.place.has_waited and not self.claimed.is_new)

    def end_before_start(self, state: Literal["stopped", "failed"], message: str) -> ExitCode:
        """Record why a run that had a place in the queue does not start."""
        assert self.place is not None and self.recorder is not None  # noqa: S101 - see `is_kept`
        if state == "failed":
            self._start_notifier(self.recorder.folder, self.request.config)
        self.recorder.record(RunFinished(state=state, message=message))
        self.place.save(stage=QueueStage.ENDED)
        resumable = state == "stopped" and self.recorder.folder.resumable
        return ExitCode.STOPPED if resumable else ExitCode.FAILED

    def interrupt(self) -> ExitCode:
        """Leave a detached run that has not started as it is: `gputrain queue resume` continues its wait.

        A host that shuts down first sends SIGTERM to all processes."""
        assert self.place is not None and self.recorder is not None  # noqa: S101 - see `is_kept`
        name = self.recorder.folder.name
        message = f"interrupted by a signal before it started; `gputrain queue resume {name}` starts it"
        self.recorder.record(WarningEvent(message=message, code="interrupted"))
        return ExitCode.FAILED

    def discard(self) -> None:
        """Delete the folder of a run that has not started; a resumed one leaves the queue."""
        if self.claimed is not None:
            if self.place is not None and not self._started:
                self.place.save(stage=QueueStage.ENDED)
            self.claimed.discard()

    def release(self) -> None:
        """Close the journal, and release the folder and the GPUs."""
        if self.recorder is not None:
            self.recorder.close()
        self.allocation.reservation.release()
        if self._notifier is not None:
            self._notifier.close()
        if self.claimed is not None:
            self.claimed.ownership.release()


def run_owned(run: OwnedRun, body: Callable[[], int]) -> int:
    """Carry out a run, and return its exit code. Whatever ends it before it starts, it leaves nothing behind, or a
    record of why it does not start if it had a place in the queue.

    Raises UsageError if it is refused."""
    # Until the run starts, a signal ends this process through the clauses below, which release what it holds.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    wake_up()
    try:
        return body()
    except (UsageError, DependencyError) as error:
        if run.is_kept:
            return run.end_before_start("failed", str(error))
        run.discard()
        if isinstance(error, DependencyError):
            raise UsageError.one("queue.after", str(error), code=error.code) from error
        raise
    except CancelledError as error:
        return run.end_before_start("stopped", str(error))
    except AlreadyFinishedError:
        return ExitCode.FINISHED
    except KeyboardInterrupt:
        if run.is_kept:
            return run.interrupt()
        run.discard()
        run.listener(WarningEvent(message="stopped before the run began; nothing was created", code="stopped"))
        return ExitCode.FAILED
    except OwnershipLostError as error:
        run.listener(RunFinished(state="failed", message=str(error)))
        return ExitCode.FAILED
    finally:
        run.release()


def with_interrupted_wait(request: RunRequest) -> RunRequest:
    """Return the request to go on waiting, if it resumes a run whose wait was interrupted."""
    run = request.config.run
    if (
        run.name is None
        or not (run.resume or run.requeue)
        or not is_interrupted(RunFolder(request.runs_dir / run.name))
    ):
        return request
    return replace(request, config=request.config.with_values(device={"wait": True}))


def with_run_name(config: Config, folder: RunFolder) -> Config:
    """Return the config that the run folder stores: with the name of the run, and without `run.resume`."""
    return config.with_values(run={"name": folder.name, "resume": False})

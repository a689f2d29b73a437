"""The driver of commands: run the command of another program to its end in this process, which supervises it.

The command line calls `launch_command`. It imports no torch, and little else, because it waits in memory for days.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

from engine.command.argument_parameters import argument_parameters
from engine.command.devices import DeviceNames, device_environment, expand, name_devices
from engine.command.environment import torchrun_variables
from engine.command.metric_files import make_metrics_folder
from engine.command.process_tree import CommandProcess
from engine.command.run_id import make_run_id
from engine.command.spec import Program, forget_environment, write_command
from engine.command.stall import StallWatch
from engine.command.stop import describe_unkillable
from engine.command.terminal import Terminal, input_of_gputrain
from engine.config.limits import read_limits
from engine.config.schema import Config
from engine.foreign.parameters import Parameters
from engine.gpus.device_preview import check_devices_exist
from engine.gpus.selection import CudaDevice
from engine.launch.command_checks import find_command_problems, find_other_program, folder_problem
from engine.launch.command_metrics import RunningMetrics, result_line
from engine.launch.command_supervisor import CommandEnd, CommandSupervisor
from engine.launch.gpu_usage import GpuUsagePoller, misplaced_use_check
from engine.launch.owned_run import AlreadyFinishedError, OwnedRun, run_owned, with_interrupted_wait, with_run_name
from engine.launch.request import RunRequest, watch_other_claim
from engine.launch.run_code import copied_command
from engine.launch.slurm import requeue_job, requeue_warnings, slurm_job_id
from engine.launch.survivors import check_survivors
from engine.queue.place import fixed_terms
from engine.runs.command_events import CommandResumed, CommandStarted
from engine.runs.events import RankFailed, RunFinished, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.ownership import RunFolderGoneError
from engine.runs.recorder import Listener, Recorder
from engine.runs.records import RankDevice
from engine.runs.run_record import read_run_record
from engine.runs.sinks import Sink
from engine.utils.codec import FORMAT
from engine.utils.codec import replace as replace_fields
from engine.utils.errors import Problem, UsageError, raise_if_any
from engine.utils.exit_codes import CommandExit, ExitCode
from engine.utils.exits import exit_status, oom_kill_count
from engine.utils.host import raise_open_files_limit
from engine.utils.process import SignalHandler, ignore_sighup
from engine.utils.redaction import redact, redact_argv, redact_values

PAUSE_STEP_SECONDS = 0.1
RESTART_SECONDS = 1.0  # a command that fails at once is not started again and again without a pause


@dataclass
class CommandRun(OwnedRun):
    """What the owner of a command run holds, see `OwnedRun`."""

    @property
    def command(self) -> Program:
        assert self.request.command is not None  # noqa: S101 - `launch_command` is called with one
        return self.request.command

    @cached_property
    def started_command(self) -> Program:
        """The command as it starts: in the copy of its code if there is one."""
        assert self.claimed is not None  # noqa: S101 - it starts in its folder
        return copied_command(self.command, self.code, self.claimed.folder)

    @property
    def code_folder(self) -> Path:
        """The folder whose code the run uses."""
        return Path(self.command.cwd)

    def warn(self, problem: Problem) -> None:
        """Record a warning."""
        self.emit(WarningEvent.of(problem))

    def check_resumed(self, folder: RunFolder) -> None:
        raise_if_any(find_other_program(folder, self.command))
        record = read_run_record(folder)
        if record is not None and record.state is RunState.FINISHED:
            reason = f"{folder.name} has already finished; start the command again as a new run"
            self.listener(WarningEvent(message=reason, code="already-finished"))
            raise AlreadyFinishedError
        check_survivors(folder)

    def store_request(self, folder: RunFolder) -> None:
        # Before the run waits: a reboot may interrupt that.
        try:
            write_command(folder, self.command)
        except OSError as error:
            reason = f"{folder.path} cannot be written to: {error.strerror}"
            raise UsageError.one("runs folder", reason, code="not-writable") from error

    def _make_recorder(self, folder: RunFolder, config: Config) -> Recorder:
        line, parameters = shlex.join(redact_argv(self.command.argv)), _parameters_of(self.command.argv)
        return Recorder(folder, config, self.listener, command=line, parameters=parameters)


def launch_command(request: RunRequest, listener: Listener) -> int:
    """Run the command of a request to its end, and return the exit code of `gputrain run -- COMMAND`.

    `listener` receives every event. Raises UsageError if the request is refused, with nothing left behind."""
    ignore_sighup()
    raise_open_files_limit()
    run = CommandRun(request, listener)
    code = run_owned(run, lambda: _run(run))
    # `run_owned` returns codes of trainings for a run that has not started.
    return CommandExit.FAILED if isinstance(code, ExitCode) and code is not ExitCode.FINISHED else code


def _run(run: CommandRun) -> int:
    watch_other_claim(run.request, run.listener)
    run.request = with_interrupted_wait(run.request)
    config = run.request.config
    raise_if_any(find_command_problems(run.request))
    if config.waits:
        # Whoever started it may be gone when it has its GPUs.
        check_devices_exist(config.device.gpus, fixed_terms(config))
    devices = run.allocate(wait=config.waits)
    folder = run.claim(config).folder
    for warning in (*run.request.warnings, *requeue_warnings(config)):
        run.show_early_warning(WarningEvent.of(warning))
    run.announce(folder, with_run_name(config, folder))
    signals = SignalHandler()
    signals.install()
    usage = GpuUsagePoller([device.uuid for device in devices], processes=True)
    restart, max_restarts, began = 0, config.run.max_restarts, time.monotonic()
    limit = read_limits().minutes(config)
    try:
        session = _Session(run, folder, devices, signals, usage, began, limit)
        end = session.run()
        # Processes that cannot be killed may still hold the GPUs, so the command is not started again beside them.
        while end.exit_code != 0 and not (end.stopped_by or end.unkillable) and restart < max_restarts:
            restart += 1
            why = session.describe_failure(end)
            reason = f"{why}; starting the command again (restart {restart} of {max_restarts})"
            run.emit(WarningEvent(message=reason, code="process-failed"))
            _pause(run, signals)
            if signals.signal_name is not None:
                break
            session = _Session(run, folder, devices, signals, usage, began, limit)
            end = session.run()
        if end.exit_code != 0 and not end.stopped_by and signals.signal_name is not None:
            # Slurm sends SIGTERM to the command, too, which may end before this process has noticed its own.
            end = replace(end, stopped_by=signals.signal_name)
        requeues = config.run.requeue and signals.time_limit_near and not signals.kill_requested
        return _record_end(run, folder, session, end, should_requeue=requeues)
    except UsageError as error:
        if restart > 0:
            run.emit(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()


def _pause(run: CommandRun, signals: SignalHandler) -> None:
    """Wait before a restart, unless a signal requests a stop."""
    end = time.monotonic() + RESTART_SECONDS
    while signals.signal_name is None and time.monotonic() < end:
        run.keep_alive()
        time.sleep(PAUSE_STEP_SECONDS)


@dataclass
class _Session:
    """One start of the command. `began` is when the first one began, in monotonic seconds: restarts share the time
    limit. `limit` is that in minutes, 0 for none, and what sets it."""

    owned: CommandRun
    folder: RunFolder
    devices: Sequence[CudaDevice]
    signals: SignalHandler
    usage: GpuUsagePoller
    began: float
    limit: tuple[float, str]
    _initial_oom_kills: int | None = field(default_factory=oom_kill_count, init=False)

    def describe_failure(self, end: CommandEnd) -> str:
        """Record the rank that failed first, if the command has ranks, and return why the command failed."""
        # They take 20 ms to import, and most commands do not fail.
        from engine.command.failure import find_failure
        from engine.distributed.failures import describe_failure

        oom_killed = None if self._initial_oom_kills is None else oom_kill_count() != self._initial_oom_kills
        logs = self.folder.torchrun
        failure = find_failure(end.exit_code, end.last_lines, logs, oom_killed=oom_killed)
        hide = partial(redact_values, environment=self.owned.command.environment)
        failure = replace(failure, cause=hide(failure.cause), lines=tuple(map(hide, failure.lines)))
        if failure.rank is None:
            return failure.cause
        uuids = [device.uuid for device in self.devices]
        device = uuids[failure.rank] if failure.rank < len(uuids) else "cpu" if not uuids else "unknown"
        lines = "\n".join(failure.lines)
        event = RankFailed(rank=failure.rank, device=device, cause=failure.cause, code=failure.code, traceback=lines)
        self.owned.emit(event)
        return describe_failure(event)

    def run(self) -> CommandEnd:
        """Start the command, and supervise it to its end. Raises UsageError if it cannot be started."""
        run, recorder = self.owned, self.owned.recorder
        assert recorder is not None  # noqa: S101 - `announce` opened it
        run.check_code()
        command, path = run.started_command, self.folder.path
        names = name_devices(self.devices, self.usage.first(), command.environment)
        words = expand(command.argv, names, path.name, path)
        is_resumed = recorder.history.command is not None
        argv = [*words, *expand(command.on_resume, names, path.name, path)] if is_resumed else words
        run_id = make_run_id(self.folder)
        try:
            # A run that waits may start again without the process that writes to the pipe.
            terminal = Terminal(tty=command.tty, stdin=None if run.request.config.waits else input_of_gputrain())
        except OSError as error:
            reason = f"cannot be started: no terminal can be opened ({error.strerror})"
            raise UsageError.one(argv[0], reason, "start it with --no-tty", code="not-started") from error
        # The command may write its first metrics before it is known that it runs.
        started_at = time.time()
        try:
            process = self._start(argv, names, path, terminal, run_id)
        except BaseException:
            terminal.close_child_side()
            terminal.close()
            raise
        with process:
            terminal.close_child_side()
            parameters = _parameters_of(words)
            started = self._started_event(process.pid, run_id, argv, parameters)
            run.emit(CommandResumed.of(started) if is_resumed else started)
            named = replace_fields(command, metrics=tuple(expand(command.metrics, names, path.name, path)))
            metrics = RunningMetrics(recorder, named, parameters, started_at, run.warn, process.members)
            number = signal.Signals[command.stop_signal]
            supervisor = CommandSupervisor(
                process,
                terminal,
                recorder,
                metrics,
                self.signals,
                run.emit,
                self._on_tick(process, lambda: (terminal.num_bytes, metrics.latest)),
                number,
            )
            end = supervisor.run()
            left = process.close()
            if not left:
                return end
            unkillable = describe_unkillable(left)
            run.warn(Problem("", f"{unkillable}; it may still hold a GPU", code="process-left"))
            has_ended = all(each.pid != process.pid for each in left)
            return replace(end, unkillable=unkillable, has_ended=has_ended)

    def _start(
        self, argv: list[str], names: DeviceNames, path: Path, terminal: Terminal, run_id: str
    ) -> CommandProcess:
        """Raises UsageError."""
        command, cwd = self.owned.started_command, Path(self.owned.started_command.cwd)
        # Again: the command may have waited for days.
        if (problem := folder_problem(self.owned.request, command)) is not None:
            raise UsageError([problem])
        typed = {name: value for name, value in command.environment.items() if name in command.expanded}
        values = expand(list(typed.values()), names, path.name, path)
        environment = command.environment | dict(zip(typed, values, strict=True))
        try:
            environment |= torchrun_variables(argv, environment, self.folder.torchrun)
            environment |= make_metrics_folder(path)
            environment |= terminal.environment | device_environment(names, environment)
            return CommandProcess(
                argv,
                cwd=cwd,
                env=environment,
                stdin=terminal.stdin,
                stdout=terminal.stdout,
                stderr=terminal.stderr,
                marker=run_id,
                ignored_signals=self._ignored_signals,
            )
        except OSError as error:
            reason = f"cannot be started: {error.strerror}"
            raise UsageError.one(command.argv[0], reason, code="not-started") from error

    @property
    def _ignored_signals(self) -> tuple[int, ...]:
        """With `srun`, Slurm sends its warning to the command, too, which it would kill before it is asked to stop."""
        requeues = self.owned.request.config.run.requeue and slurm_job_id() is not None
        return (signal.SIGUSR1,) if requeues and self.owned.command.stop_signal != "SIGUSR1" else ()

    def _started_event(self, pid: int, run_id: str, argv: list[str], parameters: Parameters) -> CommandStarted:
        host, command = socket.gethostname(), self.owned.command
        ranks = [RankDevice(0, host, pid, device.uuid, device.name, device.index) for device in self.devices]
        return CommandStarted(
            format=FORMAT,
            name=self.folder.name,
            host=host,
            command=shlex.join(redact_argv(argv)),
            cwd=command.cwd,
            pid=pid,
            run_id=run_id,
            devices=[device.uuid for device in self.devices] or ["cpu"],
            ranks=ranks or [RankDevice(0, host, pid, "cpu")],
            parameters=parameters,
            versions={"gputrain": version("gputrain"), "python": platform.python_version()},
        )

    def _on_tick(self, process: CommandProcess, read_signs: Callable[[], object]) -> Callable[[], None]:
        """Return what each tick does. `read_signs` returns what changes when the command does something."""
        run = self.owned
        limit_min, limit = self.limit
        stall = StallWatch(60 * run.request.config.notify.stall_minutes)
        readings = Sink("the reading of the GPUs", run.warn)
        reserved, busy_at = {device.uuid for device in self.devices}, 0.0
        check_use = misplaced_use_check(process, reserved, self.folder.name, run.warn)

        def read_gpus() -> None:
            nonlocal busy_at
            if (event := self.usage.poll()) is None:
                return
            run.emit(event)
            busy_at = event.time if any(sample.util for sample in event.gpus) else busy_at
            if self.usage.snapshot is not None:
                check_use(self.usage.snapshot)

        def on_tick() -> None:
            try:
                run.keep_alive()
            except RunFolderGoneError as error:
                # The command may save what it has. The journal is open, and ends in the folder that was moved.
                if self.signals.signal_name is None:
                    run.emit(WarningEvent(message=str(error), code=error.code))
                    self.signals.request_stop("gputrain, whose run folder is gone")
            readings.attempt(read_gpus)
            if (stalled := stall.poll(read_signs(), busy_at)) is not None:
                run.warn(stalled)
            if limit_min and time.monotonic() - self.began > 60 * limit_min:
                self.signals.request_stop(limit)

        return on_tick


def _parameters_of(words: Sequence[str]) -> Parameters:
    """Return the parameters among the arguments of a command, without secrets."""
    found = argument_parameters(words)
    return {key: redact(key, value) if isinstance(value, str) else value for key, value in found.items()}


def _record_end(run: CommandRun, folder: RunFolder, session: _Session, end: CommandEnd, *, should_requeue: bool) -> int:
    """Requeue the Slurm job of the run if `should_requeue`, record how the command ended, and return the exit code of
    this process."""
    assert run.recorder is not None  # noqa: S101 - `announce` opened it
    opened = run.recorder.opened
    status = exit_status(end.exit_code) if end.has_ended else "has not ended"
    status += f"; {end.unkillable}" if end.unkillable else ""
    place = os.path.realpath(opened.path) if folder.is_gone else folder.name
    again = f"; `gputrain resume {shlex.quote(place)}` starts it again" if opened.resumable else ""
    if end.stopped_by:
        message = f"stop requested by {end.stopped_by}; it {status}{again}"
        message += f"; {requeue_job()}" if should_requeue and slurm_job_id() is not None else ""
        finished = RunFinished(state="stopped", message=message, exit_code=end.exit_code)
    elif end.exit_code == 0:
        finished = RunFinished(state="finished", message=result_line(run.recorder.metrics), exit_code=0)
    else:
        finished = RunFinished(state="failed", message=session.describe_failure(end), exit_code=end.exit_code)
    run.emit(finished)
    if finished.state == "finished":
        with suppress(OSError):
            forget_environment(opened, run.command)
    return end.exit_code if end.exit_code >= 0 else 128 - end.exit_code

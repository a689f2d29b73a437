"""The command of another program as the child of a run (`supervise`): its start, output, stop sequence and end.

`launcher` calls `run_program`. It imports no torch, and little else, because it waits in memory for days. The processes
are those of `engine.jobs.command.process_tree`.
"""

from __future__ import annotations

import os
import platform
import select
import shlex
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from engine.base.codec import FORMAT
from engine.base.codec import replace as replace_fields
from engine.base.colors import without_colors
from engine.base.errors import Problem, UsageError, file_errors, raise_if_any
from engine.base.exits import exit_status, oom_kill_count, signal_name
from engine.base.process import SignalHandler
from engine.base.redaction import redact_argv, redact_values
from engine.base.stall import StallWatch
from engine.base.text import list_names
from engine.base.units import format_duration
from engine.gpus.device_preview import check_devices_exist
from engine.jobs.command.devices import DeviceNames, device_environment, expand, misplaced_use, name_devices
from engine.jobs.command.environment import torchrun_variables
from engine.jobs.command.inner_commands import argument_parameters
from engine.jobs.command.metric_files import make_metrics_folder
from engine.jobs.command.process_tree import CommandProcess, Step, StopSequence, describe_unkillable
from engine.jobs.command.spec import Program, forget_environment
from engine.jobs.command.terminal import Terminal, input_of_gputrain
from engine.jobs.launch.command_checks import find_command_problems, folder_problem
from engine.jobs.launch.command_metrics import RunningMetrics, result_line
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.phases import Ended, Recording, Requested, grant, record
from engine.jobs.launch.run_code import copied_command
from engine.jobs.launch.supervise import requeue_warnings, slurm_job_id, supervise
from engine.jobs.launch.survivors import make_run_id
from engine.jobs.queue.place import fixed_terms
from engine.runs.command_events import CommandResumed, CommandStarted
from engine.runs.control import QUEUE_REQUEST_NAMES, REFUSAL_OUTCOMES, REQUEST_NAMES, ControlRequest
from engine.runs.event_lines import CommandOutput
from engine.runs.events import ControlEvent, GpuEvent, RankFailed, RunFinished, WarningEvent
from engine.runs.records import RankDevice
from engine.watch.parameters import Parameters

# A request waits so long at most.
TICK_SECONDS = 1.0
# Output is collected, so that a program that prints character by character does not wake this process for each.
COLLECT_SECONDS = 0.05
# Half of the buffer of a terminal. The program waits when it is full.
FULL_BYTES = 1 << 11
# The summary of torchrun takes seven lines a rank.
MAX_LAST_LINES = 200
RESTART_SECONDS = 1.0  # a command that fails at once is not started again and again without a pause


def run_program(requested: Requested, program: Program) -> Ended:
    """Run a command to its end. Raises UsageError if the request is refused, and as `phases` does."""
    request, config = requested.request, requested.request.config
    raise_if_any(find_command_problems(request, program))
    if config.waits:
        # Whoever started it may be gone when it has its GPUs.
        check_devices_exist(config.device.gpus, fixed_terms(config))
    granted = grant(requested, wait=config.waits)
    run = record(granted, config, (*request.warnings, *requeue_warnings(config)))
    return supervise(run, ProgramRun(run, program))


@dataclass(frozen=True)
class ProgramEnd:
    """How a command ended. `exit_code` is negative for a signal. `stopped_by` says who requested the stop, and is empty
    if it ended on its own. `last_lines` are those of its output, without colors. `unkillable` names the processes that
    SIGKILL has not ended; if the command is one of them, `has_ended` is False. `oom_kills` is the number of processes
    that the OOM killer had ended before it started, None if that is unknown."""

    exit_code: int
    stopped_by: str
    last_lines: tuple[str, ...]
    oom_kills: int | None
    unkillable: str = ""
    has_ended: bool = True


@dataclass(frozen=True)
class ProgramRun:
    """A command that this process starts."""

    run: Recording
    program: Program
    is_program = True
    pause_s = RESTART_SECONDS

    def start(self, usage: GpuUsagePoller) -> StartedProgram:
        run, path, oom_kills = self.run, self.run.folder.path, oom_kill_count()
        run.check_code()
        is_resumed = run.recorder.history.command is not None
        program = copied_command(self.program, run.claimed.code, run.folder)
        devices = run.granted.allocation.devices
        names = name_devices(devices, usage.first())
        words = expand(program.argv, names, path.name, path)
        argv = [*words, *expand(program.on_resume, names, path.name, path)] if is_resumed else words
        with ExitStack() as stack:
            with file_errors(argv[0], "cannot be started: no terminal can be opened", code="not-started"):
                # A run that waits may start again without the process that writes to the pipe.
                stdin = None if run.settled.used.waits else input_of_gputrain()
                terminal = Terminal(stdin=stdin)
            stack.callback(terminal.close)
            parameters = argument_parameters(words)
            named = replace_fields(program, metrics=tuple(expand(program.metrics, names, path.name, path)))
            processes = list[CommandProcess]()
            # The command may write its first metrics before it is known that it runs.
            started_at = time.time()
            try:
                metrics = RunningMetrics(
                    run.recorder, named, parameters, started_at, run.warn,
                    lambda: [member for process in processes for member in process.members()],
                )  # fmt: skip
                process = self._start(program, argv, names, terminal)
            finally:
                terminal.close_child_side()
            processes.append(process)
            stack.callback(process.close)
            started = self._started_event(process, argv, parameters)
            run.emit(CommandResumed.of(started) if is_resumed else started)
            stop = StopSequence(process, signal.Signals[program.stop_signal])
            return StartedProgram(run, usage, process, terminal, metrics, stop, oom_kills, stack.pop_all())

    def _start(self, program: Program, argv: list[str], names: DeviceNames, terminal: Terminal) -> CommandProcess:
        """Raises UsageError."""
        folder, request = self.run.folder, self.run.granted.requested.request
        # Again: the command may have waited for days.
        if (problem := folder_problem(request, program)) is not None:
            raise UsageError([problem])
        typed = {name: value for name, value in program.environment.items() if name in program.expanded}
        values = expand(list(typed.values()), names, folder.path.name, folder.path)
        environment = program.environment | dict(zip(typed, values, strict=True))
        # With `srun`, Slurm sends its warning to the command, too, which it would kill before it is asked to stop.
        ignored = [signal.SIGUSR1] if request.config.run.requeue and slurm_job_id() is not None else []
        # When the command ends, its terminal sends SIGHUP to what it leaves behind, which is to be named.
        ignored.append(signal.SIGHUP)
        with file_errors(program.argv[0], "cannot be started", code="not-started"):
            environment |= torchrun_variables(argv, environment, folder.torchrun)
            environment |= make_metrics_folder(folder.path)
            environment |= terminal.environment | device_environment(names)
            return CommandProcess(
                argv,
                cwd=Path(program.cwd),
                env=environment,
                stdin=terminal.stdin,
                stdout=terminal.stdout,
                stderr=terminal.stdout,
                marker=make_run_id(folder),
                ignored_signals=[number for number in ignored if number.name != program.stop_signal],
            )

    def _started_event(self, process: CommandProcess, argv: list[str], parameters: Parameters) -> CommandStarted:
        host, devices = socket.gethostname(), self.run.granted.allocation.devices
        ranks = [RankDevice(0, host, process.pid, device.uuid, device.name, device.index) for device in devices]
        return CommandStarted(
            format=FORMAT,
            name=self.run.folder.name,
            host=host,
            command=shlex.join(redact_argv(argv)),
            cwd=self.program.cwd,
            pid=process.pid,
            run_id=process.run_id,
            devices=self.run.gpus or ["cpu"],
            ranks=ranks or [RankDevice(0, host, process.pid, "cpu")],
            parameters=parameters,
            versions={"gputrain": version("gputrain"), "python": platform.python_version()},
        )

    def restart_reason(self, result: ProgramEnd) -> WarningEvent | None:
        # Processes that cannot be killed may still hold the GPUs, so the command is not started again beside them.
        if result.exit_code == 0 or result.stopped_by or result.unkillable:
            return None
        message = f"{self._describe_failure(result)}; starting the command again"
        return WarningEvent(message=message, code="process-failed")

    def finish(self, result: ProgramEnd, signals: SignalHandler, requeue: Callable[[], str]) -> int:
        opened, folder, stopped_by = self.run.recorder.opened, self.run.folder, result.stopped_by
        if result.exit_code != 0 and not stopped_by and signals.signal_name is not None:
            # Slurm sends SIGTERM to the command, too, which may end before this process has noticed its own.
            stopped_by = signals.signal_name
        status = exit_status(result.exit_code) if result.has_ended else "has not ended"
        status += f"; {result.unkillable}" if result.unkillable else ""
        place = os.path.realpath(opened.path) if folder.is_gone else folder.name
        again = f"; `gputrain resume {shlex.quote(place)}` starts it again" if opened.resumable else ""
        state: Literal["finished", "stopped", "failed"]
        if stopped_by:
            state, message = "stopped", f"stop requested by {stopped_by}; it {status}{again}{requeue()}"
        elif result.exit_code == 0:
            state, message = "finished", result_line(self.run.recorder.metrics)
        else:
            state, message = "failed", self._describe_failure(result)
        self.run.emit(RunFinished(state=state, message=message, exit_code=result.exit_code))
        if state == "finished":
            with suppress(OSError):
                forget_environment(opened, self.program)
        return result.exit_code if result.exit_code >= 0 else 128 - result.exit_code

    def _describe_failure(self, end: ProgramEnd) -> str:
        """Record the rank that failed first, if the command has ranks, and return why the command failed."""
        # They take 20 ms to import, and most commands do not fail.
        from engine.jobs.command.failure import find_failure
        from engine.train.distributed.failures import describe_failure

        oom_killed = None if end.oom_kills is None else oom_kill_count() != end.oom_kills
        failure = find_failure(end.exit_code, end.last_lines, self.run.folder.torchrun, oom_killed=oom_killed)
        hide = partial(redact_values, environment=self.program.environment)
        cause, lines = hide(failure.cause), "\n".join(map(hide, failure.lines))
        if failure.rank is None:
            return cause
        uuids = self.run.gpus
        device = uuids[failure.rank] if failure.rank < len(uuids) else "cpu" if not uuids else "unknown"
        event = RankFailed(rank=failure.rank, device=device, cause=cause, code=failure.code, traceback=lines)
        self.run.emit(event)
        return describe_failure(event)


class StartedProgram:
    """One start of a command. `held` ends its processes and closes its terminal."""

    tick_s = TICK_SECONDS

    def __init__(
        self,
        run: Recording,
        usage: GpuUsagePoller,
        process: CommandProcess,
        terminal: Terminal,
        metrics: RunningMetrics,
        stop: StopSequence,
        oom_kills: int | None,
        held: ExitStack,
    ) -> None:
        self._run, self._usage, self._process, self._terminal, self._metrics = run, usage, process, terminal, metrics
        self._stop, self._stopped_by, self._oom_kills, self._held = stop, "", oom_kills, held
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._pending: list[str] = []
        self._stall, self._busy_at = StallWatch(60 * run.settled.used.notify.stall_minutes), 0.0
        self._misplaced: set[Problem] = set()
        """Uses of other GPUs that were reported."""
        self._wakeup = held.enter_context(_wakeups())

    def goes_on(self) -> bool:
        # Looking for what is left takes milliseconds, so not while the command itself runs.
        return (self._process.poll() is None and self._stop.seconds_left != 0) or not self._stop.poll()

    def wait(self, until: float) -> float:
        """Wait for output, the end of the command or a signal."""
        is_running, poll = self._process.poll() is None, select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if is_running:
            poll.register(self._process.fileno(), select.POLLIN)
        output = self._terminal.fileno()
        if output is not None:
            poll.register(output, select.POLLIN)
        left = max(until - time.monotonic(), 0.0)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * (left if is_running else COLLECT_SECONDS))}
        if self._wakeup in ready:
            os.read(self._wakeup, 1 << 10)
        before = self._terminal.num_bytes
        self._add_output(self._terminal.read())
        if is_running and output is not None and ready == {output} and self._terminal.num_bytes - before < FULL_BYTES:
            poll.unregister(output)
            poll.poll(1000 * COLLECT_SECONDS)
        return until

    def tick(self, usage: GpuEvent | None) -> None:
        self._show_output()
        self._metrics.poll(self._terminal.pending)
        if usage is not None:
            self._busy_at = usage.time if any(sample.util for sample in usage.gpus) else self._busy_at
            self._check_gpus()
        silent_s = self._stall.poll(self._terminal.num_bytes, self._metrics.latest, self._busy_at)
        if silent_s is not None:
            reason = f"no output, no metric and no work on its GPUs for {format_duration(silent_s)}"
            self._run.warn(Problem("", reason, code="stalled"))

    def _check_gpus(self) -> None:
        """Warn once of each use of GPUs that the run has not reserved."""
        if (snapshot := self._usage.snapshot) is None:
            return
        members = {member.pid for member in self._process.members()}
        problem = misplaced_use(snapshot, members, set(self._run.gpus), self._run.folder.name)
        if problem is not None and problem not in self._misplaced:
            self._misplaced.add(problem)
            self._run.warn(problem)

    @property
    def is_stopping(self) -> bool:
        return bool(self._stopped_by)

    def serve(self, request: ControlRequest, *, is_second: bool) -> str:
        name = request.request
        if name == "stop" and is_second and self._stop.step < Step.KILL:
            self._stop.request()
            return "its processes are killed"
        if name == "stop" and self._stopped_by:
            return "already requested"
        if name == "stop":
            self._stopped_by = request.by
            self._stop.request()
            return f"{signal_name(self._stop.stop_signal)} sent; SIGTERM and SIGKILL follow if it does not end"
        if name in QUEUE_REQUEST_NAMES:
            return "ignored: the run does not wait for GPUs"
        if name in REQUEST_NAMES:
            return "refused: only trainings of gputrain do that; a command takes stop"
        return REFUSAL_OUTCOMES.get(name, "unknown request, ignored")

    def kill(self) -> None:
        if self._stop.step < Step.KILL:
            request = ControlRequest(request="stop", by="a second SIGINT")
            outcome = self.serve(request, is_second=True)
            self._run.emit(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    def end(self) -> ProgramEnd:
        self._add_output(self._terminal.close())
        self._metrics.close()
        if self._stop.left_behind and not self._stopped_by:
            names = list_names(self._stop.left_behind)
            reason = f"the command left processes behind, which were ended: {names}"
            self._run.warn(Problem("", reason, code="process-left"))
        code = self._process.poll()
        # Without one, SIGKILL has not ended it.
        number = -signal.SIGKILL if code is None else code
        end = ProgramEnd(number, self._stopped_by, tuple(self._last_lines), self._oom_kills)
        if not (left := self._process.close()):
            return end
        unkillable = describe_unkillable(left)
        self._run.warn(Problem("", f"{unkillable}; it may still hold a GPU", code="process-left"))
        has_ended = all(each.pid != self._process.pid for each in left)
        return replace(end, unkillable=unkillable, has_ended=has_ended)

    def close(self) -> None:
        self._held.close()

    def _add_output(self, lines: list[str]) -> None:
        if not lines:
            return
        self._run.recorder.add_output(lines)
        self._show_output(lines)
        self._last_lines.extend(text for line in lines[-MAX_LAST_LINES:] if (text := without_colors(line)).strip())
        self._metrics.add_lines(lines, self._terminal.pending())

    def _show_output(self, lines: Sequence[str] = ()) -> None:
        """Show final lines, and below them those that may still change."""
        pending = self._terminal.pending()
        self._run.recorder.show_pending(pending)
        if lines or pending != self._pending:
            self._pending = pending
            self._run.recorder.show(CommandOutput(lines=[*lines], pending=tuple(pending)))


@contextmanager
def _wakeups() -> Iterator[int]:
    """Yield a descriptor that is readable when a signal has arrived."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)

"""The screen of the run of a command: what `tui.screens.foreign_run` shows of its metrics and its log, its state and
its GPUs, and the control requests that it sends.

`tui.pollers.runs` reads the journal, `tui.pollers.process` the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text

from engine.command.run_metrics import MetricsFinder
from engine.command.spec import has_command
from engine.foreign.folders import ForeignRun
from engine.gpus.snapshot import Snapshot
from engine.runs.folder import RunFolder, RunState
from engine.runs.metrics import NO_METRICS
from engine.runs.run_row import RunRow, read_row
from engine.utils.errors import Problem
from engine.utils.text import printable
from engine.utils.units import UNKNOWN, format_bytes, format_duration, format_percent
from tui.keymap import COMMAND_RUN_KEYS, Key
from tui.palette import MUTED, STRONG, WARNING
from tui.phrases import gpu_name, state_symbol
from tui.pollers.foreign_run import ForeignRunPoller
from tui.pollers.process import OwnerPoller, ProcessReading
from tui.pollers.runs import RunPoller, RunSnapshot
from tui.screens.base import AppServices
from tui.screens.dialogs import TextDialog
from tui.screens.foreign_panels import MAX_LOG_LINES, ForeignRoom
from tui.screens.foreign_run import ForeignRunScreen
from tui.screens.host_panel import load_text
from tui.screens.log import LogDialog
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen
from tui.screens.run_changes import RunChanges
from tui.screens.run_progress import state_lines
from tui.tables import fact_lines
from tui.tables.log_lines import log_lines
from tui.tables.ranks import rank_lines
from tui.tables.run_facts import run_facts

# The supervisor and the keeper, which start the command.
COMMAND_DEPTH = 2


class CommandRunScreen(ForeignRunScreen):
    """Follows the run of a command, live or ended."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = COMMAND_RUN_KEYS
    is_own = True

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        self.folder = folder
        self._metrics = MetricsFinder(folder)
        self._owner_poller = OwnerPoller(folder, app.intervals.poll_s)
        super().__init__(app, self._metrics.find(), self._owner_poller)
        self.follow(self._owner_poller)
        self._poller = self.follow(RunPoller(folder, queues_events=False))
        self._changes = RunChanges(app, self)
        self._had_charts: bool | None = None

    def make_poller(self, run: ForeignRun) -> ForeignRunPoller:
        return ForeignRunPoller(run, self.is_busy, self._metrics.find)

    @property
    def snapshot(self) -> RunSnapshot | None:
        """The latest state of the run; None before the first poll."""
        return self._poller.latest

    @property
    def state(self) -> RunState | None:
        return RunState(self.snapshot.row.state) if self.snapshot is not None else None

    @property
    def is_live(self) -> bool:
        return self.state is not None and self.state.live

    @property
    def _gpus(self) -> Snapshot | None:
        return self.gputrain_app.gpu_poller.snapshot

    def update_content(self) -> None:
        self.watched_run = self.run_poller.run
        super().update_content()
        load = load_text(self.gputrain_app.host_poller.value)
        self.show_title(printable(self.folder.name), printable(str(self.folder.path.parent)), load)
        panel, snapshot = self.foreign_panels.gpu_panel, self.snapshot
        if panel.display and snapshot is not None:
            title, lines = rank_lines(snapshot.ranks, self._gpus, panel.text_width, 1)
            panel.set_titles(title)
            panel.set_texts(lines[1:], lines[:1])
        if self._had_charts != bool(self.num_charts):
            self._had_charts = bool(self.num_charts)
            (self.active_chart if self._had_charts else self.foreign_panels.log_panel).focus()

    @property
    def log_tail(self) -> Sequence[str]:
        # With the lines that may still change.
        return self.snapshot.log if self.snapshot is not None else ()

    def log_texts(self) -> list[Text]:
        return log_lines(self.log_tail[-MAX_LOG_LINES:], ())

    def make_room(self, width: int, height: int) -> ForeignRoom:
        gpus = len(self._devices)
        return ForeignRoom(width, height, self.num_charts, len(self.log_tail), gpus + 1 if gpus else 0)

    @property
    def _devices(self) -> Sequence[str]:
        """UUIDs of the GPUs of the run."""
        started = self.snapshot.ranks.command if self.snapshot is not None else None
        return () if started is None else [device for device in started.devices if device != "cpu"]

    def show_status(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            self.show_lines([Text(" Loading …", MUTED)], [], [])
            return
        message = state_lines(snapshot, self._poller.unexpected_error, self._gpus, self.size.width, self.app.console)
        for problem in self.run_poller.reader.problems:
            message.append(Text(f" {printable(problem)}", WARNING, no_wrap=True, overflow="ellipsis", end=""))
        command = f" $ {printable(snapshot.row.record.command)}"
        line = Text(command, MUTED, no_wrap=True, overflow="ellipsis", end="")
        self.show_lines([self._state_line(snapshot.row)], [line] if snapshot.row.record.command else [], message)

    def _state_line(self, row: RunRow) -> Text:
        """Return the state of the run, how far it is, and what it uses of the host."""
        sign, style = state_symbol(row.shown_state)
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        line.append(f" {sign} ", style).append(row.shown_state, STRONG)
        seconds = row.age_seconds if row.state in (RunState.RUNNING, RunState.STOPPING) else row.record.seconds
        if seconds:
            line.append(f" {'for' if row.live else 'after'} {format_duration(seconds)}")
        if row.live or self.chart_data.num_points or not self.run_poller.caught_up:
            line.append("  ").append_text(self.reading_text())
        reading = self._owner_poller.latest
        if row.live and reading is not None:
            _append_use(line, reading)
        if row.live and not self.foreign_panels.gpu_panel.display:
            gpus = self._gpus.gpus if self._gpus is not None else ()
            for device in self._devices:
                use = next((gpu.value("util") for gpu in gpus if gpu.uuid == device), None)
                line.append(f"   GPU {gpu_name(device, self._gpus)} ", MUTED)
                line.append(UNKNOWN if use is None else format_percent(use))
        return line

    def is_available(self, action: str) -> bool:
        if action == "stop":
            return self.is_live
        if action == "resume":
            return self.state is not None and not self.state.live and self.state is not RunState.FINISHED
        if action == "processes":
            return self.is_live and self._owner_poller.latest is not None
        return action == "log" or super().is_available(action)

    def title_of(self, key: Key) -> str:
        if key.action == "archive" and self.snapshot is not None and self.snapshot.row.archived:
            return "unarchive"
        return super().title_of(key)

    def action_log(self) -> None:
        self.app.push_screen(LogDialog(self.folder.name, lambda: self.log_tail))

    def action_processes(self) -> None:
        process = self._owner_poller.process
        if process is None or not self.is_available("processes"):
            reason = "The processes of the run have ended, or are on another host"
            self.gputrain_app.show_toast(Problem("", reason, code="not-running"))
            return
        self.app.push_screen(ProcessScreen(self.gputrain_app, process, opens_run=False))

    def action_stop(self) -> None:
        self._changes.stop(self.folder, self.state)

    def action_resume(self) -> None:
        self.gputrain_app.resume_run(self.folder, self.state)

    def action_again(self) -> None:
        self._changes.again(self.folder)

    def action_tags(self) -> None:
        self._changes.tags(self._rows)

    def action_note(self) -> None:
        self._changes.note(next(iter(self._rows), None))

    def action_archive(self) -> None:
        self._changes.archive(self._rows)

    @property
    def _rows(self) -> list[RunRow]:
        return [] if self.snapshot is None else [self.snapshot.row]

    def action_parameters(self) -> None:
        """Show what is known of the run, and its parameters, which are read in a thread."""
        dialog = TextDialog(f"Command of {self.folder.name}", [Text("Loading …", MUTED)])

        def read() -> list[Text]:
            row = read_row(self.folder)
            facts = {} if row is None else run_facts(row, self.folder, NO_METRICS)
            facts.pop("parameters", None)
            parameters = fact_lines(self.run_poller.reader.parameters())
            lines = [Text(line) for line in fact_lines(facts)]
            return [*lines, Text(""), Text("Parameters", STRONG), *map(Text, parameters or ["none found"])]

        self.app.push_screen(dialog)
        self.act(read, dialog.show, in_thread=True)

    def export_folder(self) -> tuple[Path, str]:
        if not self.folder.is_own:
            return Path(), "the working directory"
        return self.folder.exports, str(self.folder.exports)

    def export_name(self) -> str:
        return self.folder.name


def make_run_screen(app: AppServices, folder: RunFolder) -> CommandRunScreen | RunScreen:
    """Return the screen of a run: that of its command, or that of a training."""
    return CommandRunScreen(app, folder) if has_command(folder) else RunScreen(app, folder)


def _append_use(line: Text, reading: ProcessReading) -> None:
    """Append what the processes of a command use of the host."""
    processes = [process for process in reading.tree.processes if process.depth >= COMMAND_DEPTH]
    known = [reading.cpu_percent[process.id.pid] for process in processes if process.id.pid in reading.cpu_percent]
    if known:
        line.append("   CPU ", MUTED).append(format_percent(sum(known)))
    if processes:
        line.append("   memory ", MUTED).append(format_bytes(sum(process.memory_bytes for process in processes)))

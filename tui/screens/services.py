"""The part of the app that screens use: settings, pollers and navigation. `tui.screens.app` is the app itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from engine.base.errors import Problem, UsageError
from tui.screens.phrases import resume_problem
from tui.screens.pollers.host import GpuPoller, HostPoller
from tui.screens.pollers.run_lists import RunListPoller
from tui.screens.pollers.watched import RefreshIntervals
from tui.screens.widgets.lines import Lines
from tui.terminal.app import TerminalApp

if TYPE_CHECKING:
    from engine.jobs.hosts.reading import HostReading
    from engine.jobs.hosts.watch import HostWatch
    from engine.jobs.launch.detached import LaunchedRun
    from engine.runs.folder import RunFolder, RunState
    from engine.runs.run_view import SortOrder
    from engine.watch.folders import ForeignRun
    from engine.watch.process import ProcessId
    from engine.watch.reading import ColumnChoice
    from tui.screens.command_dialog import CommandLine
    from tui.screens.pollers.process import ProcessPoller


class AppServices(TerminalApp):
    """Opens screens and starts runs, and has the pollers that all screens share."""

    def __init__(
        self,
        runs_dir: Path,
        *,
        first: Callable[[AppServices], object] | None = None,
        intervals: RefreshIntervals | None = None,
        gpu_poller: GpuPoller | None = None,
        host_poller: HostPoller | None = None,
        demo_notice: str | None = None,
        column_choice: ColumnChoice | None = None,
        hosts: Sequence[str] | None = None,
        called_host: str = "",
    ) -> None:
        """Open on the GPU monitor, or on the screen that `first` opens above it.

        `column_choice` says how files of rows of other programs are read. `demo_notice` is shown on every screen and
        disables starting runs. `hosts` are other hosts that the monitor follows, by default those of the user's
        settings. `called_host` is the name of this host where the user sits, if that is elsewhere: then leaving the
        first screen leaves this one.
        """
        super().__init__()
        self.intervals = intervals or RefreshIntervals()
        self.runs_dir, self.demo_notice = runs_dir, demo_notice
        self._first, self.column_choice = first, column_choice
        self._hosts, self.called_host = hosts, called_host
        self.host_watch: HostWatch | None = None
        """Follows other hosts; None without any."""
        self.gpu_poller = gpu_poller or GpuPoller(self.intervals.poll_s)
        self.host_poller = host_poller or HostPoller(runs_dir, self.intervals.poll_s)
        self.run_list_poller = RunListPoller(runs_dir, self.intervals.poll_s)
        self.pending_runs: list[LaunchedRun] = []
        """Runs launched by this app whose journals have no events yet."""
        self.opened_runs: list[RunFolder] = []
        """Runs that were opened or started in this session."""
        self.picked_gpu_uuids: set[str] = set()
        """UUIDs of the GPUs picked for the next run."""
        self.marked_runs: dict[str, None] = {}
        """Folders of the runs that are marked in the list, in the order in which they were marked."""
        self.list_order: SortOrder | None = None
        """The order that the user chose for the lists of runs."""
        self.typed_command: CommandLine | None = None
        """The last line of the dialog that starts a command."""
        self.watched_screen: Screen[Any] | None = None
        """The screen of what `gputrain watch` watches, which a key of the monitor shows again."""
        self.last_key_time = -math.inf
        """Monotonic time of the last key."""
        self.refresh_s = self.intervals.poll_s
        """Seconds between updates of a screen, more if nobody uses it."""

    def source_notice(self) -> str | None:
        """Return the notice that marks simulated or recorded data on every screen, or None."""
        snapshot = self.gpu_poller.snapshot
        return self.demo_notice or (snapshot.source.notice if snapshot is not None else None)

    def refuses_in_demo(self, what: str) -> bool:
        """Whether this is the demo, which has nothing to act on; a toast says `what` it cannot do."""
        if self.demo_notice:
            self.show_toast(Problem("", f"Demo mode: {what}", code="not-supported"))
        return bool(self.demo_notice)

    def host_readings(self) -> Sequence[HostReading]:
        """Return what other hosts have said."""
        return () if self.host_watch is None else self.host_watch.readings()

    def show_toast(self, message: str | Problem | UsageError, *, timeout_s: float = 5.0) -> None:
        """Show a toast at the top if it would cover the row that it speaks of, which is under the cursor."""
        is_low = (
            isinstance(self.focused, Lines)
            and self.focused.content_region.y + self.focused.cursor_y > self.size.height // 2
        )
        self.screen.set_class(is_low, "-toasts-above")
        super().show_toast(message, timeout_s=timeout_s)

    def open_run(self, folder: str) -> None:
        """Open the screen of the run in `folder`."""
        from engine.runs.folder import RunFolder
        from tui.screens.run import RunScreen

        opened = RunFolder(Path(folder))
        if opened not in self.opened_runs:
            self.opened_runs.append(opened)
        self.push_screen(RunScreen(self, opened))

    def open_foreign_run(self, run: ForeignRun, process: ProcessPoller | None = None) -> None:
        """Open the screen of a run that another program recorded. `process` watches its process, if one is known."""
        from tui.screens.run import RunScreen

        self.push_screen(RunScreen(self, run, process))

    def open_watched(self, screen: Screen[Any]) -> None:
        """Open the screen of what `gputrain watch` watches."""
        self.push_screen(screen)
        # Not destroyed when it is left, so that it keeps its marks and what it has read.
        self.watched_screen = screen
        self.install_screen(screen, "watched")

    def open_process(self, process: ProcessId) -> None:
        """Open the screen of a process, and of the run that it writes."""
        from tui.screens.process import ProcessScreen

        self.push_screen(ProcessScreen(self, process))

    def open_compare(self, runs: Sequence[Path | ForeignRun]) -> None:
        """Compare the runs in these folders, and foreign runs."""
        from engine.report.foreign_run import as_foreign
        from engine.runs.comparison import require_comparable
        from engine.runs.folder import RunFolder
        from tui.screens.compare import CompareScreen

        try:
            require_comparable(len(runs))
        except UsageError as error:
            self.show_toast(error)
            return
        opened = [as_foreign(RunFolder(run) if isinstance(run, Path) else run) for run in runs]
        self.push_screen(CompareScreen(self, opened))

    def open_sweep(self, run_name: str = "") -> None:
        """Open the sweep that a run is a trial of by its name, else the latest sweep of the runs folder."""
        from tui.screens.sweep import make_sweep_screen

        try:
            self.push_screen(make_sweep_screen(self, run_name))
        except UsageError as error:
            self.show_toast(error)

    def open_gpu(self, key: str) -> None:
        """Open the screen of the GPU with this key (`tui.screens.phrases.gpu_key`)."""
        from tui.screens.gpu import GpuScreen

        if self.gpu_poller.snapshot is not None and self.gpu_poller.snapshot.gpus:
            self.push_screen(GpuScreen(self, key))

    def show_launch(self, launched: LaunchedRun) -> None:
        """Show the screen of a run that is starting, which has a folder only if it is resumed."""
        from tui.screens.run import RunScreen, unnamed_run

        self.pending_runs.append(launched)
        self.push_screen(RunScreen(self, launched.claimed or unnamed_run(launched.runs_dir), launched=launched))

    def launch(
        self,
        arguments: Sequence[str],
        resumed: RunFolder | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> bool:
        """Start `gputrain` with these arguments and show its start. Return whether it was started; the demo refuses.

        `resumed` is the run that goes on, and `begun` is called when the run has begun."""
        from tui.screens.launcher import launch_run

        if self.refuses_in_demo("runs cannot be started"):
            return False
        try:
            launched = launch_run(arguments, self.runs_dir if resumed is None else resumed.path.parent)
        except UsageError as error:
            self.show_toast(error)
            return False
        launched.begun, launched.claimed = begun, resumed
        self.show_launch(launched)
        return True

    def resume_run(self, folder: RunFolder, state: RunState | None) -> None:
        """Resume a run that has ended, or start its command again."""
        from engine.runs.run_config import read_changed_config
        from tui.screens.dialogs import ask_to_share_gpus

        if (problem := resume_problem(folder, state)) is not None:
            self.show_toast(problem)
            return
        arguments = ["resume", "--headless", str(folder.path)]
        launch = partial(self.launch, arguments, folder)
        ask_to_share_gpus(self, read_changed_config(folder.config) or {}, launch)

    def open_form(self, run_config: Path | None = None) -> None:
        """Open the form for a new run, prefilled from `run_config`, the config of another run."""
        from tui.screens.form import FormScreen

        self.push_screen(FormScreen(self, run_config))

    async def action_back(self) -> None:
        if self.called_host and len(self.screen_stack) <= 1 + (self._first is not None):
            self.exit()
        elif len(self.screen_stack) > 1:
            self.pop_screen()

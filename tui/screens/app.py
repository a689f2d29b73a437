"""The Textual app of `gputrain-tui`: opens the screens and owns the pollers that feed them.

The app only reads run folders and GPU snapshots, and sends control requests. Runs are separate processes, started by
`tui.screens.launcher`; they continue when the app exits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.screen import Screen

from engine.base.errors import Problem, UsageError
from tui.screens.base import Dialog, GputrainScreen, ResizableScreen, is_too_small
from tui.screens.keymap import GLOBAL_KEYS, LIST_KEYS, make_bindings
from tui.screens.monitor import MonitorScreen
from tui.screens.phrases import resume_problem
from tui.screens.pollers.host import GpuPoller, HostPoller
from tui.screens.pollers.run_lists import RunListPoller
from tui.screens.pollers.watched import LOW_BANDWIDTH_INTERVALS, UNATTENDED_SECONDS, RefreshIntervals
from tui.screens.widgets.lines import Lines
from tui.terminal.app import TerminalApp, resume_garbage_collection

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

MOUNT_POLL_SECONDS = 0.001
# Keys wait so long for the first content of a screen; the runs folder may be on a file system that hangs.
MAX_CONTENT_WAIT_SECONDS = 3.0
STARTUP_SECONDS = 1.0
PENDING_RUN_SECONDS = 0.2
MAX_TOAST_LINES = 8
# Of a screen that is hidden because the terminal is too small; the notice names them.
HIDDEN_SCREEN_KEYS = {"q": "quit", "ctrl+c": "quit", "question_mark": "help", "f1": "help"}
# psutil is imported after the first frames.
HOST_DELAY_SECONDS = 0.4


class GputrainApp(TerminalApp, inherit_bindings=False):
    """The Textual application: screens, pollers, and starting runs."""

    TITLE = "gputrain"
    # Textual loads the style sheet of a screen that is pushed, but not that of the default screen.
    CSS_PATH: ClassVar[list[str | PurePath]] = ["app.tcss", "monitor.tcss"]
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *make_bindings(GLOBAL_KEYS),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(
        self,
        runs_dir: Path,
        *,
        first: Callable[[GputrainApp], object] | None = None,
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
        disables starting runs. `hosts` are other hosts that the monitor follows, by default
        those of the user's settings. `called_host` is the name of this host where the user sits, if that is elsewhere:
        then leaving the first screen leaves this one.
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
        self.typed_command: CommandLine | None = None
        """The last line of the dialog that starts a command."""
        self.watched_screen: Screen[Any] | None = None
        """The screen of what `gputrain watch` watches, which a key of the monitor shows again."""
        self.last_key_time = -math.inf
        self.refresh_s = self.intervals.poll_s
        self._used_at = time.monotonic()
        self._is_searching = False

    async def on_event(self, event: events.Event) -> None:
        """Send keys that arrive together with the key that opens a screen or a dialog to it.

        Textual sends them to the widget that has the focus when they arrive, before the screen is open."""
        if isinstance(event, events.InputEvent):
            self._used_at = time.monotonic()
            self.adapt_refresh()
        if isinstance(event, events.Key):
            self.last_key_time = time.monotonic()
            if self._exit:
                # Widgets are removed: a dialog that a key opens now would not find its own.
                return
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded and self._is_hidden:
            if isinstance(event, events.Key) and event.key in HIDDEN_SCREEN_KEYS:
                await self.run_action(HIDDEN_SCREEN_KEYS[event.key])
        elif not isinstance(event, events.Key):
            await super().on_event(event)
        elif not event.is_forwarded:
            await self._wait_for_content()
            await super().on_event(event)
        elif isinstance(self.screen, GputrainScreen | Dialog) and event.time < self.screen.opened_at:
            self.post_message(events.Key(event.key, event.character))
        else:
            await super().on_event(event)

    @property
    def _is_hidden(self) -> bool:
        """Whether the terminal is too small for the screen."""
        return is_too_small(self.size) and not (isinstance(self.screen, ResizableScreen) and self.screen.FITS_ANY_SIZE)

    async def _wait_for_content(self) -> None:
        """Wait until the screen has what keys act on: they would do nothing in an empty list."""
        while not self.screen.is_mounted:
            await asyncio.sleep(MOUNT_POLL_SECONDS)
        if isinstance(screen := self.screen, GputrainScreen | Dialog):
            deadline = screen.opened_at + MAX_CONTENT_WAIT_SECONDS
            while not screen.has_content and time.monotonic() < deadline:
                await asyncio.sleep(MOUNT_POLL_SECONDS)

    def source_notice(self) -> str | None:
        """Return the notice that marks simulated or recorded data on every screen, or None."""
        snapshot = self.gpu_poller.snapshot
        return self.demo_notice or (snapshot.source.notice if snapshot is not None else None)

    def refuses_in_demo(self, what: str) -> bool:
        """Whether this is the demo, which has nothing to act on; a toast says `what` it cannot do."""
        if self.demo_notice:
            self.show_toast(Problem("", f"Demo mode: {what}", code="not-supported"))
        return bool(self.demo_notice)

    def get_default_screen(self) -> Screen[Any]:
        return MonitorScreen(self)

    def on_mount(self) -> None:
        if self._first is not None:
            self._first(self)
        for poller in (self.gpu_poller, self.run_list_poller):
            poller.on_first_result = self._show_first_result
        # Its first snapshot may already wait in the pipe; the run list costs CPU time that the first frame needs.
        self.gpu_poller.start()
        self.call_after_refresh(self.run_list_poller.start)
        # The demo shows nothing of the real host.
        if self.demo_notice is None:
            self.set_timer(HOST_DELAY_SECONDS, self.host_poller.start)
            self.set_timer(HOST_DELAY_SECONDS, lambda: self.run_worker(self._watch_hosts, thread=True, group="hosts"))
        self.set_timer(STARTUP_SECONDS, resume_garbage_collection)
        self.set_interval(PENDING_RUN_SECONDS, self._watch_pending_runs)
        self.set_interval(LOW_BANDWIDTH_INTERVALS.poll_s, self.adapt_refresh)

    def _watch_hosts(self) -> None:
        """Follow the other hosts. Called in a thread, because the settings take long to import."""
        from engine.base.files import settings_file

        if self._hosts is None and not settings_file().exists():
            return
        from engine.config.settings import read_settings
        from engine.jobs.hosts.watch import HostWatch

        try:
            if names := read_settings().hosts if self._hosts is None else self._hosts:
                self.host_watch = HostWatch(names, self.runs_dir)
        except UsageError as error:
            self.call_from_thread(self.show_toast, error)

    def host_readings(self) -> Sequence[HostReading]:
        """Return what other hosts have said."""
        return () if self.host_watch is None else self.host_watch.readings()

    def _show_first_result(self) -> None:
        """Update the screen without waiting for its refresh interval. Called in the thread of a poller."""
        if isinstance(screen := self.screen, GputrainScreen):
            screen.call_later(screen.update_if_on_top)

    def adapt_refresh(self) -> None:
        """Refresh less often while nobody uses the screen."""
        is_used = time.monotonic() - self._used_at < UNATTENDED_SECONDS
        refresh_s = self.intervals.poll_s if is_used else max(self.intervals.poll_s, LOW_BANDWIDTH_INTERVALS.poll_s)
        if refresh_s == self.refresh_s:
            return
        self.refresh_s = refresh_s
        of_screens = [
            poller for screen in self.screen_stack if isinstance(screen, GputrainScreen) for poller in screen.pollers
        ]
        for poller in (self.gpu_poller, self.host_poller, self.run_list_poller, *of_screens):
            poller.min_interval_s = 0.0 if is_used else refresh_s
            if is_used:
                poller.request_poll()

    def on_unmount(self) -> None:
        self.gpu_poller.close()
        self.host_poller.close()
        self.run_list_poller.close()
        if self.host_watch is not None:
            self.host_watch.close()

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

    def action_queue(self) -> None:
        from tui.screens.queue import QueueScreen

        if not isinstance(self.screen, QueueScreen):
            self.push_screen(QueueScreen(self))

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

    def action_command(self) -> None:
        from tui.screens.command_dialog import ask_command

        ask_command(self, self)

    def resume_run(self, folder: RunFolder, state: RunState | None) -> None:
        """Resume a run that has ended, or start its command again."""
        from engine.runs.run_config import read_changed_config
        from tui.screens.dialogs import ask_to_share_gpus

        if (problem := resume_problem(folder, state)) is not None:
            self.show_toast(problem)
            return
        arguments = ["resume", "--headless", str(folder.path)]
        launch = partial(self.launch, arguments, folder)
        ask_to_share_gpus(self, self, read_changed_config(folder.config) or {}, launch)

    def _watch_pending_runs(self) -> None:
        """Look in a thread for what becomes of the runs that are starting: there may be thousands of runs."""
        if self.pending_runs and not self._is_searching:
            self._is_searching, pending = True, list(self.pending_runs)

            def search() -> None:
                # A run that has ended by now has its folder.
                found = [(launched, launched.exit_code, launched.find_folder()) for launched in pending]
                self.call_from_thread(self._show_launches, found)

            self.run_worker(search, thread=True, group="pending")

    def _show_launches(self, found: Sequence[tuple[LaunchedRun, int | None, RunFolder | None]]) -> None:
        """Show what has become of runs: on their screens unless a dialog covers them, else in toasts."""
        from tui.screens.run import RunScreen

        self._is_searching = False
        for launched, code, folder in found:
            of_run = (each for each in self.screen_stack if isinstance(each, RunScreen) and each.launched is launched)
            screen = next(of_run, None)
            if launched not in self.pending_runs or screen not in (None, self.screen):
                continue
            if folder is not None or (code is not None and screen is None):
                self.pending_runs.remove(launched)
            if folder is not None:
                launched.begun()
                self._show_begun_run(folder, launched.warning, is_left=screen is None)
            elif screen is not None:
                screen.update_if_on_top()
            elif code is not None:
                reason = "\n".join(launched.output_lines()[-MAX_TOAST_LINES:])
                self.show_toast(Problem("", f"The run did not start.\n{reason}", code="not-started"), timeout_s=30)

    def _show_begun_run(self, folder: RunFolder, warning: Problem | None, *, is_left: bool) -> None:
        """Replace the form and the screen of the start with the run, or say that it has started if they were left."""
        from tui.screens.form import FormScreen
        from tui.screens.run import RunScreen

        if is_left:
            self.opened_runs.append(folder)
            self.show_toast(f"{folder.name} has started")
            return
        if warning is not None:
            self.show_toast(warning, timeout_s=15)
        while isinstance(self.screen, FormScreen) or getattr(self.screen, "launched", None) is not None:
            self.pop_screen()
        if not (isinstance(self.screen, RunScreen) and self.screen.folder == folder):
            self.open_run(str(folder.path))

    def open_form(self, run_config: Path | None = None) -> None:
        """Open the form for a new run, prefilled from `run_config`, the config of another run."""
        from tui.screens.form import FormScreen

        self.push_screen(FormScreen(self, run_config))

    def action_new_run(self) -> None:
        """Open the form for a training; where trainings are not installed, ask for a command."""
        from engine.base.libraries import training_problem

        if (problem := training_problem()) is None:
            self.open_form()
            return
        self.action_command()
        self.show_toast(problem)

    def action_runs(self) -> None:
        from tui.screens.runs import RunsScreen

        self.push_screen(RunsScreen(self))

    def action_watched(self) -> None:
        if self.watched_screen is None:
            advice = "start the screen with `gputrain watch PATH`"
            self.show_toast(Problem("", "Nothing is watched", advice, code="not-recorded"))
        elif self.watched_screen not in self.screen_stack:
            self.push_screen(self.watched_screen)

    async def action_back(self) -> None:
        if self.called_host and len(self.screen_stack) <= 1 + (self._first is not None):
            self.exit()
        elif len(self.screen_stack) > 1:
            self.pop_screen()

    def action_help(self) -> None:
        from engine.report.readings import READINGS
        from tui.screens.dialogs import HelpDialog

        screen = self.screen
        if isinstance(screen, GputrainScreen):
            groups = {
                "This screen": screen.screen_keys,
                "Lists": LIST_KEYS,
                "Everywhere": screen.SHARED_KEYS,
            }
            readings = [READINGS[key] for key in screen.SHOWN_READINGS]
            self.push_screen(HelpDialog(groups, screen.is_available, readings))

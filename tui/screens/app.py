"""The Textual app of `gputrain-tui`: opens the screens and owns the pollers that feed them.

The app only reads run folders and GPU snapshots, and sends control requests. Runs are separate processes, started by
`tui.screens.launcher`; they continue when the app exits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.screen import Screen

from engine.base.errors import Problem, UsageError
from tui.screens.base import Dialog, GputrainScreen, ResizableScreen, is_too_small
from tui.screens.keymap import GLOBAL_KEYS, LIST_KEYS, make_bindings
from tui.screens.monitor import MonitorScreen
from tui.screens.pollers.watched import LOW_BANDWIDTH_INTERVALS, UNATTENDED_SECONDS
from tui.screens.services import AppServices
from tui.terminal.app import resume_garbage_collection

if TYPE_CHECKING:
    from engine.jobs.launch.detached import LaunchedRun
    from engine.runs.folder import RunFolder

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


class GputrainApp(AppServices, inherit_bindings=False):
    """The Textual application: starts the pollers, sends keys to the screens, and shows what becomes of runs."""

    TITLE = "gputrain"
    # Textual loads the style sheet of a screen that is pushed, but not that of the default screen.
    CSS_PATH: ClassVar[list[str | PurePath]] = ["app.tcss", "monitor.tcss"]
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *make_bindings(GLOBAL_KEYS),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    _used_at = math.inf
    """Monotonic time of the last key or mouse event."""
    _is_searching = False
    """Whether a thread looks for what becomes of the runs that are starting."""

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

    def get_default_screen(self) -> Screen[Any]:
        return MonitorScreen(self)

    def on_mount(self) -> None:
        self._used_at = time.monotonic()
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

    def action_queue(self) -> None:
        from tui.screens.queue import QueueScreen

        if not isinstance(self.screen, QueueScreen):
            self.push_screen(QueueScreen(self))

    def action_command(self) -> None:
        from tui.screens.command_dialog import ask_command

        ask_command(self)

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

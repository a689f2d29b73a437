"""What the keys of the monitor do with the GPU, the process or the run under the cursor, here or on another host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gpus.snapshot import Gpu, Snapshot
from engine.runs.run_row import RunRow
from tui.screens.gpu_processes import GpuProcessesScreen
from tui.screens.keymap import Key
from tui.screens.monitor_runs import MonitorRuns, RunMarks
from tui.screens.phrases import gpu_key
from tui.screens.run_keys import CHANGES, RunKeysScreen
from tui.screens.services import AppServices
from tui.screens.widgets.lines import Lines

if TYPE_CHECKING:
    from tui.screens.monitor_hosts import MonitorHosts
    from tui.screens.tables.hosts import HostGroup

# The second one is beside the first, with the second half of many GPUs.
GPU_PANELS = ("gpus", "more-gpus")
# What is done with a run of another host.
REMOTE_ACTIONS = ("stop", "pause", "resume", "delete", "log")


class MonitorKeysScreen(GpuProcessesScreen, RunKeysScreen):
    """Base class of the monitor."""

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._runs, self._marks = MonitorRuns(), RunMarks(app.marked_runs)
        self._hosts: MonitorHosts | None = None
        """This host and others; None without others."""

    def show_panel(self, name: str) -> None:
        """Show the content of one of the panels `gpus`, `processes` and `runs` anew."""
        raise NotImplementedError

    @property
    def _snapshot(self) -> Snapshot | None:
        return self.gputrain_app.gpu_poller.snapshot

    @property
    def _gpus(self) -> Sequence[Gpu]:
        return self._snapshot.gpus if self._snapshot is not None else ()

    def _host_of_cursor(self) -> HostGroup | None:
        """Return the host whose line or GPU has the cursor, None for this one."""
        group = self._hosts and self._hosts.find(self.query_one("#gpus", Lines).selected_key)
        return group if group and not group.is_here else None

    def _focused_gpu(self) -> Gpu | None:
        """Return the GPU under the cursor; None while another panel has the focus."""
        focused = self.focused
        if not isinstance(focused, Lines) or focused.id not in GPU_PANELS:
            return None
        return next((gpu for gpu in self._gpus if gpu_key(gpu) == focused.selected_key), None)

    def _picked_names(self) -> str:
        """Return the indices of the picked GPUs: `2, 3`."""
        picked = self.gputrain_app.picked_gpu_uuids
        return ", ".join(str(gpu.index) for gpu in self._gpus if gpu_key(gpu) in picked)

    def is_available(self, action: str) -> bool:
        focused = self.focused.id if self.focused is not None else None
        if action == "back":
            return self.has_open_filter
        if action == "select":
            if focused == "runs":
                return self._open_title() is not None and self._remote_run() is None
            return self._focused_gpu() is not None
        if action == "signal":
            return focused == "processes" and self._selected_process() is not None and self.shows_own_processes
        if action == "open":
            return self._open_title() is not None
        if action in CHANGES:
            return self.can_change(action)
        if action == "compare":
            return len(self._marks.rows(self._runs.matching)) > 1
        return action != "app.watched" or self.gputrain_app.watched_screen is not None

    def title_of(self, key: Key) -> str:
        if key.action == "open":
            return self._open_title() or key.title
        if key.action == "app.new_run" and (names := self._picked_names()):
            return f"run on {names}"
        return super().title_of(key)

    def _open_title(self) -> str | None:
        """Return what enter does in the focused panel; None for nothing."""
        focused = self.focused
        if not isinstance(focused, Lines) or focused.selected_key is None:
            return None
        if focused.id == "processes":
            selected = self._selected_process() if self.shows_own_processes else None
            return None if selected is None else "open run" if self.run_of(selected) is not None else "open"
        if focused.id == "runs":
            row = self._runs.find(focused.selected_key)
            return None if row is None else "open sweep" if row.trials else "open run"
        if self._hosts is not None and focused.id in GPU_PANELS:
            return self._hosts.title_of(focused.selected_key)
        return "open GPU" if focused.id in GPU_PANELS else None

    def action_select(self) -> None:
        """Select the GPU under the cursor, or the run."""
        runs, app, row = self.query_one("#runs", Lines), self.gputrain_app, self.selected_run()
        if self._remote_run() is not None:
            app.show_toast("gputrain compare HOST:RUN compares runs of other hosts")
        elif row is not None:
            self._marks.toggle(self._runs.runs_of(row))
            self.show_panel("runs")
            runs.action_move(1)
        elif (gpu := self._focused_gpu()) is not None:
            app.picked_gpu_uuids ^= {gpu_key(gpu)}
            self.show_panel("gpus")
        else:
            app.show_toast("Space selects a GPU of this host, or a run that has started")
        self.update_keys()

    def action_compare(self) -> None:
        """Compare the selected runs."""
        self.gputrain_app.open_compare([Path(row.folder) for row in self._marks.rows(self._runs.matching)])

    def action_open(self) -> None:
        focused = self.focused
        if isinstance(focused, Lines) and focused.selected_key is not None:
            self._open(focused, focused.selected_key)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        # By now, a key that was typed at once after it may have moved the cursor.
        event.prevent_default()
        self._open(event.lines, event.key)

    def _open(self, panel: Lines, key: str) -> None:
        if panel.id in GPU_PANELS and self._hosts is not None and self._hosts.is_elsewhere(key):
            self._hosts.open(key)
            self.update_content()
            self.update_keys()
        elif panel.id in GPU_PANELS:
            self.gputrain_app.open_gpu(key)
        elif panel.id == "runs" and self._runs.is_waiting(key):
            self.gputrain_app.show_toast("This run waits for GPUs; it can be opened when it has started")
        elif panel.id == "runs":
            row = self._runs.find(key)
            if row is not None and self._hosts is not None and self._hosts.is_remote(row):
                self._hosts.attach(row)
            elif row is not None and row.trials:
                self.gputrain_app.open_sweep(row.name)
            else:
                self.gputrain_app.open_run(key)
        elif (selected := self._selected_process()) is not None and self.shows_own_processes:
            self.open_process(selected)

    def on_lines_moved(self, event: Lines.Moved) -> None:
        # Textual calls the handler of the base class, too.
        if self._hosts is not None and event.lines.id == "gpus":
            # The cursor does not wait for the processes of another host.
            self.call_after_refresh(self.show_panel, "processes")

    # Runs, here or on other hosts

    def selected_run(self) -> RunRow | None:
        focused = self.focused
        if not isinstance(focused, Lines) or focused.id != "runs":
            return None
        return self._runs.find(focused.selected_key)

    def target_runs(self) -> list[RunRow]:
        row = self.selected_run()
        return self._marks.rows(self._runs.matching) or ([] if row is None else self._runs.runs_of(row))

    def _remote_run(self) -> RunRow | None:
        """Return the run under the cursor if it is on another host."""
        row = None if self._hosts is None else self.selected_run()
        return row if self._hosts is not None and self._hosts.is_remote(row) else None

    def can_change(self, action: str) -> bool:
        row = self._remote_run()
        if row is not None and self._hosts is not None:
            return action in REMOTE_ACTIONS and self._hosts.can(action, row)
        return super().can_change(action)

    def act_on_run(self, action: str, act: Callable[[RunRow], object]) -> None:
        row = self._remote_run()
        if row is None or self._hosts is None:
            super().act_on_run(action, act)
        elif action in REMOTE_ACTIONS:
            self._hosts.change(action, row)

    def action_signal(self) -> None:
        if not self.query_one("#processes").has_focus:
            self.gputrain_app.show_toast("Select a process first, with tab or the mouse")
        elif not self.shows_own_processes:
            self.gputrain_app.show_toast("A process of another host gets no signals from here")
        else:
            super().action_signal()

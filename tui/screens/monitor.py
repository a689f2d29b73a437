"""The monitor screen, shown first: the GPUs of this host, the processes on them, and the runs.

`tui.pollers` provides the data, `tui.tables.gpu_blocks` and `tui.screens.host_panel` format it,
`tui.screens.monitor_runs` lists the runs, and `tui.screens.monitor_layout` divides the room.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.markup import escape

from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from engine.show.readings import READINGS
from engine.utils.errors import Problem
from engine.utils.text import printable
from tui.keymap import MONITOR_KEYS, Key
from tui.palette import ACCENT, BAD, MUTED
from tui.phrases import gpu_key, is_free, no_driver_problem, users
from tui.screens.base import AppServices
from tui.screens.gpu_processes import GpuProcessesScreen
from tui.screens.host_panel import header_line
from tui.screens.monitor_layout import Demand, MonitorLayout, arrange
from tui.screens.monitor_runs import MonitorRuns, RunMarks
from tui.tables import fact_lines
from tui.tables.gpu_blocks import GpuBlocks, GpuView
from tui.tables.processes import gpu_matches, list_gpu_processes, process_matches
from tui.widgets.lines import KeyedRow, Lines

NAME = " gputrain  "
# The second one is beside the first, with the second half of many GPUs.
GPU_PANELS = ("gpus", "more-gpus")
# Before the first snapshot, room is kept for as many GPUs.
EXPECTED_GPUS = 8
# What can be done without a GPU, by the key or the command that does it.
WITHOUT_GPU = {
    "n": "start a run on the CPU",
    "F2": "start a script of your own",
    "gputrain-tui --demo": "see eight simulated GPUs",
}


class Body(Container):
    """The panels of the monitor, which the screen arranges anew if their room changes."""

    # Textual also draws what is behind the panels, and styles every line of it unless it is known to be blank.
    BLANK = True

    def on_resize(self) -> None:
        screen = self.screen
        if isinstance(screen, MonitorScreen):
            screen.call_after_refresh(screen.update_content)


class MonitorScreen(GpuProcessesScreen):
    """GPUs, processes and runs."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = MONITOR_KEYS
    shows_runs = True
    SHOWN_READINGS = tuple(READINGS)

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._runs, self._marks = MonitorRuns(), RunMarks(app.marked_runs)
        self._moved_focus_to_runs = False
        self._shown: dict[str, tuple[object, ...]] = {}
        """What the panels were last formatted from, by their IDs."""
        self._room: MonitorLayout | None = None
        self._gpu_blocks: GpuBlocks | None = None
        """The lines of the GPUs of the snapshot that is shown."""
        self._shown_picked: tuple[set[str], str] = (set(), "")
        """The picked GPUs and the filter that are shown."""

    def compose_body(self) -> ComposeResult:
        with Body(id="body"):
            with Horizontal(id="gpu-panels"):
                yield Lines(selectable=True, id="gpus", empty_text=Text("Loading …", MUTED))
                yield Lines(selectable=True, id="more-gpus")
            yield Lines(selectable=True, id="processes")
            yield Lines(selectable=True, id="runs")

    @property
    def _snapshot(self) -> Snapshot | None:
        return self.gputrain_app.gpu_poller.snapshot

    @property
    def _gpus(self) -> Sequence[Gpu]:
        return self._snapshot.gpus if self._snapshot is not None else ()

    @property
    def _gpu_problem(self) -> Problem | None:
        return self.gputrain_app.gpu_poller.problem or self.gputrain_app.gpu_poller.unexpected_error

    def update_content(self) -> None:
        snapshot, app = self._snapshot, self.gputrain_app
        poller = app.run_list_poller
        self._runs = self._runs.select(poller.waiting, poller.rows or (), self.filter_text)
        # Of all processes, so that the panels keep their places while the user types a filter.
        self._divide_room(len(self._all_processes()))
        self._show_gpus()
        self._show_processes()
        self._show_runs()
        header = header_line(
            snapshot, app.host_poller.value, app.source_notice(), app.refresh_s, self.size.width - len(NAME)
        )
        self.show_line("#title", Text.assemble((NAME, ACCENT), header, no_wrap=True, end=""))

    # Layout

    def _divide_room(self, processes: int) -> None:
        """Give each panel its room."""
        body = self.query_one(Body).size
        gpus = len(self._gpus) or (1 if self._gpu_problem else 0 if self._snapshot is not None else EXPECTED_GPUS)
        layout = arrange(Demand(body.width, body.height, gpus, processes))
        if layout == self._room or not body.height:
            return
        self._room = layout
        for name, height in (("gpu-panels", layout.gpus), ("processes", layout.processes), ("runs", layout.runs)):
            panel = self.query_one(f"#{name}")
            panel.display = height > 0
            panel.styles.height = max(height, 1)
        self.query_one("#more-gpus").display = layout.gpu_columns > 1
        # The text widths of the panels follow in the next refresh.
        self.call_after_refresh(self.update_if_on_top)

    def _is_shown(self, panel: Lines, *content: object) -> bool:
        """Whether the panel shows this content already; note that it does from here on."""
        before = self._shown.get(panel.id or "")
        self._shown[panel.id or ""] = content
        return before == content

    # GPUs

    def _show_gpus(self) -> None:
        lines, snapshot = self.query_one("#gpus", Lines), self._snapshot
        message, style, advice = str(self._gpu_problem or ""), BAD, list[str]()
        if not message and snapshot is not None and not snapshot.gpus:
            message, style = str(no_driver_problem(snapshot)), ""
            advice = [] if snapshot.pending else fact_lines(WITHOUT_GPU)
        if message:
            self._gpu_blocks = None
            lines.set_titles("GPUs")
            wrapped = textwrap.wrap(printable(message), max(lines.text_width, 20))
            lines.set_texts([*(Text(line, style) for line in wrapped), *map(Text, advice)])
        elif snapshot is not None and snapshot.gpus and self._room is not None:
            picked = self.gputrain_app.picked_gpu_uuids
            view = GpuView(lines.text_width, self._room.gpu_lines, self.span_s)
            if self._gpu_blocks is None or not self._is_shown(lines, snapshot, view):
                self._gpu_blocks = GpuBlocks(snapshot, self.gputrain_app.gpu_poller.loads, view)
            elif (picked, self.filter_text) == self._shown_picked:
                return
            self._shown_picked = (set(picked), self.filter_text)
            rows = []
            for gpu in snapshot.gpus:
                if not gpu_matches(self.filter_text, gpu):
                    continue
                first, *more = self._gpu_blocks.lines(gpu, picked=gpu_key(gpu) in picked)
                rows.append(KeyedRow(gpu_key(gpu), first, tuple(more)))
            per_panel = -(-len(snapshot.gpus) // self._room.gpu_columns)
            self.query_one("#more-gpus", Lines).set_rows(rows[per_panel:], [self._gpu_blocks.header])
            free = sum(is_free(gpu) for gpu in snapshot.gpus)
            title = f"GPUs  [$success b]{free} free[/]" if free else "GPUs  none free"
            lines.set_titles(title, self._picked_title())
            empty = Text(self._no_match("GPUs", len(snapshot.gpus)), MUTED)
            lines.set_rows(rows[:per_panel], [self._gpu_blocks.header], empty)
        else:
            lines.set_titles("GPUs")
        if snapshot is not None and not snapshot.gpus and lines.has_focus and not self._moved_focus_to_runs:
            self._moved_focus_to_runs = True
            self.query_one("#runs").focus()

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

    def _picked_title(self) -> str:
        """Return the picked GPUs, and whom a run on them would share them with, as markup."""
        picked = [gpu for gpu in self._gpus if gpu_key(gpu) in self.gputrain_app.picked_gpu_uuids]
        others = dict.fromkeys(name for gpu in picked for name in users(gpu))
        shared = f"[$warning]shared with {escape(', '.join(others))}[/]  " if others else ""
        return f"{shared}[$accent b]selected: {self._picked_names()}[/]" if picked else ""

    # Processes and runs

    def _all_processes(self) -> list[tuple[Gpu, GpuProcess | None]]:
        return list_gpu_processes(self._snapshot, self.process_order) if self._snapshot is not None else []

    def _matching_processes(self) -> list[tuple[Gpu, GpuProcess | None]]:
        query = self.filter_text
        return [
            (gpu, process)
            for gpu, process in self._all_processes()
            if not query or (process and process_matches(query, gpu, process))
        ]

    def _show_processes(self) -> None:
        panel = self.query_one("#processes", Lines)
        if self._is_shown(panel, self._snapshot, self.filter_text, self.process_order, panel.text_width):
            return
        processes = self._matching_processes()
        known = sum(len(gpu.processes.value or ()) for gpu in self._gpus)
        title = self._count_title("Processes", sum(process is not None for _, process in processes), known)
        self.show_process_rows(
            processes,
            f"{title}, by {self.process_order}" if known > 1 else title,
            self._no_match("processes", known) or "No process uses a GPU",
        )

    def _show_runs(self) -> None:
        panel, poller, runs = self.query_one("#runs", Lines), self.gputrain_app.run_list_poller, self._runs
        problem = printable(str(poller.problem or poller.unexpected_error or ""))
        no_match = self._no_match("runs", runs.total) or "No runs yet; press n to start one"
        empty = Text(problem or no_match if poller.rows is not None else "Loading …", MUTED)
        title = self._count_title("Runs", runs.count, runs.total)
        if not self.filter_text:
            marked = len(self._marks.rows(runs.matching))
            counts = ((runs.live, "live"), (runs.num_waiting, "waiting"), (marked, "selected"))
            title += "".join(f", {number} {state}" for number, state in counts if number)
        panel.set_titles(title)
        panel.set_rows(runs.lines(panel.text_width, self._marks), empty_text=empty)

    def _count_title(self, name: str, shown: int, count: int) -> str:
        if not self.filter_text:
            return f"{name}  {count}"
        return f"{name}  {shown} of {count} match '{escape(printable(self.filter_text))}'"

    def _no_match(self, name: str, count: int) -> str:
        """Return that nothing matches the filter; empty without a filter or without rows."""
        return f"0 of {count} {name} match '{printable(self.filter_text)}'" if self.filter_text and count else ""

    # Commands

    def is_available(self, action: str) -> bool:
        focused = self.focused.id if self.focused is not None else None
        if action == "back":
            return self.has_open_filter
        if action == "select":
            return self._focused_gpu() is not None or (focused == "runs" and self._open_title() is not None)
        if action == "signal":
            return focused == "processes" and self._selected_process() is not None
        if action == "open":
            return self._open_title() is not None
        if action == "compare":
            return len(self._marks.rows(self._runs.matching)) > 1
        return action != "app.watched" or self.gputrain_app.watched_screen is not None

    def title_of(self, key: Key) -> str:
        if key.action == "open":
            return self._open_title() or key.title
        if key.action == "app.new_run" and (names := self._picked_names()):
            return f"new run on {names}"
        return super().title_of(key)

    def _open_title(self) -> str | None:
        """Return what enter does in the focused panel; None for nothing."""
        focused = self.focused
        if not isinstance(focused, Lines) or focused.selected_key is None:
            return None
        if focused.id == "processes":
            selected = self._selected_process()
            return None if selected is None else "open run" if self.run_of(selected) is not None else "open"
        if focused.id == "runs":
            row = self._runs.find(focused.selected_key)
            return None if row is None else "open sweep" if row.trials else "open run"
        return "open GPU" if focused.id in GPU_PANELS else None

    def action_select(self) -> None:
        """Select the GPU under the cursor, or the run."""
        runs, app = self.query_one("#runs", Lines), self.gputrain_app
        if runs.has_focus and self._open_title() is None and runs.selected_key is not None:
            app.show_toast("This run waits for GPUs; it can be selected when it has started")
        elif runs.has_focus and runs.selected_key is not None:
            if (row := self._runs.find(runs.selected_key)) is not None:
                self._marks.toggle(self._runs.runs_of(row))
            self._show_runs()
            runs.action_move(1)
        elif (gpu := self._focused_gpu()) is not None:
            app.picked_gpu_uuids ^= {gpu_key(gpu)}
            self._show_gpus()
        else:
            app.show_toast("Space selects a GPU or a run: go to their panels with tab")
        self.update_keys()

    def action_compare(self) -> None:
        """Compare the selected runs."""
        self.gputrain_app.open_compare([Path(row.folder) for row in self._marks.rows(self._runs.matching)])

    def action_open(self) -> None:
        focused = self.focused
        if isinstance(focused, Lines) and focused.selected_key is not None:
            self._open(focused, focused.selected_key)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self._open(event.lines, event.key)

    def _open(self, panel: Lines, key: str) -> None:
        if panel.id in GPU_PANELS:
            self.gputrain_app.open_gpu(key)
        elif panel.id == "runs" and self._runs.is_waiting(key):
            self.gputrain_app.show_toast("This run waits for GPUs; it can be opened when it has started")
        elif panel.id == "runs":
            row = self._runs.find(key)
            if row is not None and row.trials:
                self.gputrain_app.open_sweep(row.name)
            else:
                self.gputrain_app.open_run(key)
        elif (selected := self._selected_process()) is not None:
            self.open_process(selected)

    def action_signal(self) -> None:
        if not self.query_one("#processes").has_focus:
            self.gputrain_app.show_toast("Select a process first, with tab or the mouse")
            return
        self._signaler.ask(self, self._selected_process())

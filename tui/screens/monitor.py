"""The monitor screen, shown first: the GPUs of this host, the processes on them, and the runs.

`tui.screens.pollers` provides the data, `tui.screens.tables.gpu_blocks` and `tui.screens.host_panel` format it,
`tui.screens.monitor_runs` lists the runs, `tui.screens.monitor_layout` divides the room, and
`tui.screens.monitor_keys` has what the keys do.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.base.text import printable
from engine.gpus.snapshot import Gpu, GpuProcess
from engine.report.readings import READINGS
from engine.runs.run_row import RunRow
from tui.screens.host_panel import header_line
from tui.screens.keymap import MONITOR_KEYS, Key
from tui.screens.monitor_keys import MonitorKeysScreen
from tui.screens.monitor_layout import Demand, MonitorLayout, arrange
from tui.screens.phrases import gpu_key, is_free, no_driver_problem, users
from tui.screens.services import AppServices
from tui.screens.tables import fact_lines
from tui.screens.tables.gpu_blocks import GpuBlocks, GpuView
from tui.screens.tables.processes import gpu_matches, list_gpu_processes, process_matches, run_words
from tui.screens.widgets.lines import KeyedRow, Lines, escape_markup
from tui.terminal.palette import ACCENT, BAD, MUTED

if TYPE_CHECKING:
    from tui.screens.monitor_hosts import MonitorHosts

NAME = " gputrain  "
# Before the first snapshot, room is kept for as many GPUs.
EXPECTED_GPUS = 8
# What can be done without a GPU, by the key or the command that does it.
WITHOUT_GPU = {
    "n": "start a run on the CPU",
    "F2": "start a script of your own",
    "gputrain-tui --demo": "see eight simulated GPUs",
    "gputrain-tui --hosts HOST,…": "see the GPUs of other hosts",
}


class Body(Container):
    """The panels of the monitor, which the screen arranges anew if their room changes."""

    # Textual also draws what is behind the panels, and styles every line of it unless it is known to be blank.
    BLANK = True

    def on_resize(self) -> None:
        screen = self.screen
        if isinstance(screen, MonitorScreen):
            screen.call_after_refresh(screen.update_content)


class MonitorScreen(MonitorKeysScreen):
    """GPUs, processes and runs."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = MONITOR_KEYS
    shows_runs = True
    SHOWN_READINGS = tuple(READINGS)

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
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
            yield Lines(selectable=True, id="gpus", empty_text=Text("Loading …", MUTED))
            yield Lines(selectable=True, id="more-gpus")
            yield Lines(selectable=True, id="processes")
            yield Lines(selectable=True, id="runs")

    def update_content(self) -> None:
        snapshot, app = self._snapshot, self.gputrain_app
        poller = app.run_list_poller
        self._update_hosts()
        rows: Sequence[RunRow] = poller.rows or ()
        if self._hosts is not None and poller.rows is not None:
            rows = self._hosts.merge(rows)
        self._runs = self._runs.select(poller.waiting, rows, run_words(self.filter_text))
        self._divide_room()
        for name in ("gpus", "processes", "runs"):
            self.show_panel(name)
        width = self.size.width - len(NAME)
        sums = "" if self._hosts is None else self._hosts.summary
        header = header_line(snapshot, app.host_poller.value, app.source_notice(), app.refresh_s, width, sums)
        self.show_line("#title", Text.assemble((NAME, ACCENT), header, no_wrap=True, end=""))

    def show_panel(self, name: str) -> None:
        if name == "gpus" and self._hosts is not None:
            self._show_hosts(self._hosts)
        elif name == "gpus":
            self._show_gpus()
        elif name == "processes":
            self._show_processes()
        else:
            self._show_runs()

    # Layout

    def _update_hosts(self) -> None:
        """Take the readings of other hosts, if there are any."""
        readings = self.gputrain_app.host_readings()
        if self._hosts is None and readings:
            from tui.screens.monitor_hosts import MonitorHosts

            self._hosts = MonitorHosts(self.gputrain_app, self)
        if self._hosts is not None:
            self._hosts.update(self._snapshot, self.gputrain_app.gpu_poller.problem, readings)

    def _divide_room(self) -> None:
        """Give each panel its room. The panels keep it while the user types a filter, and with the cursor on another
        host."""
        body, hosts, problem = self.query_one(Body).size, self._hosts, self.gputrain_app.gpu_poller.problem
        if hosts is None:
            gpus = len(self._gpus) or (1 if problem else 0 if self._snapshot is not None else EXPECTED_GPUS)
            folded, processes = sum(map(is_free, self._gpus)), len(self._all_processes())
            layout = arrange(Demand(body.width, body.height, gpus, processes, folded=folded))
        else:
            layout = hosts.arrange(body.width, body.height)
        if layout == self._room or not body.height:
            return
        self._room = layout
        # A container around both panels of GPUs would take a tenth of the time of each key.
        panels, heights = self.query_one(Body).styles, (layout.gpus, layout.processes, layout.runs)
        panels.grid_size_columns = layout.gpu_columns
        panels.grid_rows = " ".join(str(height) for height in heights if height)
        for name in ("processes", "runs"):
            panel = self.query_one(f"#{name}")
            panel.display, panel.styles.column_span = getattr(layout, name) > 0, layout.gpu_columns
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
        message, style, advice = str(self.gputrain_app.gpu_poller.problem or ""), BAD, list[str]()
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
            lines.set_titles(_free_title(free), self._picked_title())
            empty = Text(self._no_match("GPUs", len(snapshot.gpus)), MUTED)
            lines.set_rows(rows[:per_panel], [self._gpu_blocks.header], empty)
        else:
            lines.set_titles("GPUs")
        if snapshot is not None and not snapshot.gpus and lines.has_focus and not self._moved_focus_to_runs:
            self._moved_focus_to_runs = True
            self.query_one("#runs").focus()

    def _show_hosts(self, hosts: MonitorHosts) -> None:
        from tui.screens.tables.hosts import host_lines

        lines, picked = self.query_one("#gpus", Lines), self.gputrain_app.picked_gpu_uuids
        shown = hosts.shown(self.filter_text)
        if self._is_shown(lines, shown, set(picked), self.filter_text, lines.text_width):
            return
        header, texts = host_lines(shown, picked, lines.text_width)
        free = sum(group.free for group, _ in shown)
        lines.set_titles(_free_title(free), self._picked_title())
        rows = [KeyedRow(key, text) for key, text in texts.items()]
        lines.set_rows(rows, [header], Text(self._no_match("hosts", len(hosts.groups)), MUTED))

    def _picked_title(self) -> str:
        """Return the picked GPUs, and whom a run on them would share them with, as markup."""
        picked = [gpu for gpu in self._gpus if gpu_key(gpu) in self.gputrain_app.picked_gpu_uuids]
        others = dict.fromkeys(name for gpu in picked for name in users(gpu))
        shared = f"[$warning]shared with {escape_markup(', '.join(others))}[/]  " if others else ""
        return f"{shared}[$accent b]selected: {self._picked_names()}[/]" if picked else ""

    # Processes and runs

    def _all_processes(self) -> list[tuple[Gpu, GpuProcess | None]]:
        """Return the processes of the host under the cursor."""
        group = self._host_of_cursor()
        snapshot = self._snapshot if group is None else group.reading.snapshot
        return list_gpu_processes(snapshot.gpus, self.process_order) if snapshot is not None else []

    def _matching_processes(self) -> list[tuple[Gpu, GpuProcess | None]]:
        query = self.filter_text
        return [
            (gpu, process)
            for gpu, process in self._all_processes()
            if not query or (process and process_matches(query, gpu, process))
        ]

    def _show_processes(self) -> None:
        panel = self.query_one("#processes", Lines)
        group = self._host_of_cursor()
        snapshot = self._snapshot if group is None else group.reading.snapshot
        if self._is_shown(
            panel, group and group.name, snapshot, self.filter_text, self.process_order, panel.text_width
        ):
            return
        processes = self._matching_processes()
        self.shows_own_processes = group is None
        known = sum(process is not None for _, process in self._all_processes())
        title = self._count_title(
            "Processes" if group is None else f"Processes of {group.name}",
            sum(process is not None for _, process in processes),
            known,
        )
        self.show_process_rows(
            processes,
            f"{title}, by {self.process_order}" if known > 1 else title,
            self._no_match("processes", known) or "No process uses a GPU",
        )

    def _show_runs(self) -> None:
        panel, poller, runs = self.query_one("#runs", Lines), self.gputrain_app.run_list_poller, self._runs
        problem = printable(str(poller.problem or ""))
        no_runs = "All runs are archived; press r, then H" if runs.rows else "No runs yet; press n to start one"
        no_match = self._no_match("runs", runs.total) or no_runs
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
        return f"{name}  {shown} of {count} match '{escape_markup(printable(self.filter_text))}'"

    def _no_match(self, name: str, count: int) -> str:
        """Return that nothing matches the filter; empty without a filter or without rows."""
        return f"0 of {count} {name} match '{printable(self.filter_text)}'" if self.filter_text and count else ""


def _free_title(free: int) -> str:
    """Return the title of the GPUs, as markup."""
    return f"GPUs  [$success b]{free} free[/]" if free else "GPUs  none free"

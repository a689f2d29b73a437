"""The screen of one GPU: the past of its load, all its readings, its MIG instances and its processes.

`tui.screens.tables.gpu_readings` formats the readings. `tui.screens.pollers.host.GpuPoller` records the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid

from engine.base.errors import Problem
from engine.base.text import printable
from engine.base.units import UNKNOWN, format_duration
from engine.gpus.snapshot import Gpu, Missing
from engine.report.readings import READINGS
from tui.charts.history import LOAD_READINGS, LoadPlot, shown_seconds
from tui.screens.gpu_processes import GpuProcessesScreen
from tui.screens.keymap import GPU_KEYS, Key
from tui.screens.phrases import gpu_key, users_text
from tui.screens.services import AppServices
from tui.screens.tables.gpu_readings import instance_lines, reading_lines
from tui.screens.tables.processes import list_gpu_processes
from tui.screens.widgets.lines import Lines
from tui.terminal.palette import BAD, MUTED

# A graph this wide has room for its mean and maximum.
MIN_SUMMARY_WIDTH = 30
# Readings of MIG GPUs and of GPUs without GPM have no graph.
UNSUPPORTED = (Missing.NOT_SUPPORTED, Missing.NOT_SUPPORTED_BY_DRIVER)
MAX_GRAPHS_LOW = 3
# Number of graphs -> columns, 3 for other numbers.
GRAPH_COLUMNS = {1: 1, 2: 2, 4: 2}


def load_summary(values: Sequence[float | None], unit: str) -> str:
    """Return mean and maximum of the known values: `mean 87%  max 100%`."""
    known = [value for value in values if value is not None]
    return f"mean {sum(known) / len(known):.0f}{unit}  max {max(known):.0f}{unit}" if known else ""


class GpuScreen(GpuProcessesScreen):
    """One GPU, by its key (`tui.screens.phrases.gpu_key`). A GPU that does not answer keeps its last readings."""

    CSS_PATH = "gpu.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = GPU_KEYS
    SHOWN_READINGS = tuple(READINGS)

    def __init__(self, app: AppServices, key: str) -> None:
        super().__init__(app)
        self._key = key
        # In a low terminal, only the first graphs are shown; from `-high` on, the readings have a frame.
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (24, "-medium"), (30, "-high")]

    def compose_body(self) -> ComposeResult:
        with Grid(id="graphs"):
            for key in LOAD_READINGS:
                yield Lines(id=key, focusable=False)
        yield Lines(id="facts", focusable=False)
        yield Lines(id="instances", title="MIG instances")
        yield Lines(selectable=True, id="processes")

    def on_mount(self) -> None:
        self.query_one("#processes").focus()

    @property
    def _gpus(self) -> Sequence[Gpu]:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        return snapshot.gpus if snapshot is not None else ()

    @property
    def _gpu(self) -> Gpu | None:
        """The GPU in the latest snapshot; None if the driver no longer reports it."""
        return next((gpu for gpu in self._gpus if gpu_key(gpu) == self._key), None)

    def update_content(self) -> None:
        snapshot, gpu = self.gputrain_app.gpu_poller.snapshot, self._gpu
        if snapshot is None or gpu is None:
            unknown = Problem("", "The driver does not report this GPU", code="gpu-not-found")
            problem = self.gputrain_app.gpu_poller.problem or unknown
            self.show_title(printable(self._key))
            self.query_one("#facts", Lines).set_texts([Text(printable(str(problem)), BAD)])
            return
        known = self.gputrain_app.gpu_poller.loads.last_answer(gpu) or gpu
        name = printable(known.value("name") or "")
        picked = " (selected)" if self._key in self.gputrain_app.picked_gpu_uuids else ""
        place = f"{snapshot.gpus.index(gpu) + 1} of {len(snapshot.gpus)} "
        self.show_title(f"GPU {gpu.index}{picked}", f"{name}   {users_text(known)}", place)
        # A silent sampler repeats its last snapshot with older GPUs, a silent GPU is in newer snapshots.
        now = max(snapshot.time, (gpu.time or 0.0) + gpu.age)
        self._show_graphs(gpu, known, now)
        self._show_facts(gpu, known, now)
        self._show_instances(known)
        uses = list_gpu_processes([known], self.process_order)
        self.show_process_rows(uses, "Processes", "No process uses this GPU")

    def _show_graphs(self, gpu: Gpu, known: Gpu, now: float) -> None:
        keys = [key for key in LOAD_READINGS if known[key].reason not in UNSUPPORTED]
        shown = keys[: MAX_GRAPHS_LOW if self.has_class("-low") else None]
        panels = {key: self.query_one(f"#{key}", Lines) for key in LOAD_READINGS}
        if [key for key in LOAD_READINGS if panels[key].display] != shown:
            for key, panel in panels.items():
                panel.display = key in shown
            self.query_one("#graphs").styles.grid_size_columns = GRAPH_COLUMNS.get(len(shown), 3)
            # Their sizes are known after the layout.
            self.call_after_refresh(self.update_if_on_top)
        for key in shown:
            self._show_graph(panels[key], gpu, known, now)

    def _show_graph(self, panel: Lines, gpu: Gpu, known: Gpu, now: float) -> None:
        key = str(panel.id)
        reading = READINGS[key]
        limit = None if reading.limit is None else known.value(reading.limit)
        plot, seconds = LoadPlot.fit(panel.text_width, panel.size.height), self.span_s
        values = self.gputrain_app.gpu_poller.loads.columns(gpu.uuid, key, seconds, plot.values, now)
        summary = load_summary(values, reading.unit if reading.limit is None else "%")
        panel.set_titles(
            f"{reading.label} {reading.full_text(known.value(key), limit)}",
            summary if panel.text_width >= MIN_SUMMARY_WIDTH else "",
        )
        top = "100" if reading.limit is None else "" if limit is None else str(round(float(reading.value_text(limit))))
        panel.set_texts(plot.lines(values, shown_seconds(seconds, plot.values), top))

    def _show_facts(self, gpu: Gpu, known: Gpu, now: float) -> None:
        panel = self.query_one("#facts", Lines)
        lines = reading_lines(known, panel.text_width)
        if gpu.state != "ok":
            reason = f"no answer for {format_duration(gpu.age)}" if gpu.state == "stale" else gpu["util"].reason
            if known is gpu:
                lines = [Text(printable(f"{reason}; it has not answered since this program started"), BAD)]
            else:
                old = "" if gpu.state == "stale" else f", {format_duration(now - (known.time or now))} old"
                lines.insert(0, Text(printable(f"{reason}; these are its last readings{old}"), BAD))
        uuid, bus_id = printable(gpu.uuid or "UUID unknown"), printable(known.value("pci_bus_id") or UNKNOWN)
        if self.has_class("-high"):
            panel.set_titles("Readings", f"{uuid}   PCI {bus_id}")
        else:
            lines.append(Text.assemble(uuid, ("  PCI ", MUTED), bus_id))
        panel.set_texts(lines)

    def _show_instances(self, known: Gpu) -> None:
        panel = self.query_one("#instances", Lines)
        panel.display = known.mig_enabled
        if known.mig_enabled:
            header, *lines = instance_lines(known, panel.text_width)
            panel.set_texts(lines, [header])

    def is_available(self, action: str) -> bool:
        if action in ("signal", "open"):
            return self._selected_process() is not None
        if action in ("sideways(-1)", "sideways(1)"):
            return len(self._gpus) > 1
        return True

    def title_of(self, key: Key) -> str:
        if key.action == "select" and self._key in self.gputrain_app.picked_gpu_uuids:
            return "unselect"
        process = self._selected_process()
        if key.action == "open" and process is not None and self.run_of(process) is None:
            return "open"
        return super().title_of(key)

    def action_sideways(self, step: int) -> None:
        """Show the next or the previous GPU; after the last comes the first."""
        keys = [gpu_key(gpu) for gpu in self._gpus]
        if len(keys) < 2:
            self.gputrain_app.show_toast("There is no other GPU")
            return
        position = keys.index(self._key) if self._key in keys else 0
        self._key = keys[(position + step) % len(keys)]
        self.update_if_on_top()

    def action_select(self) -> None:
        if self._gpu is None:
            self.gputrain_app.show_toast("The driver does not report this GPU")
            return
        self.gputrain_app.picked_gpu_uuids ^= {self._key}
        self.update_if_on_top()

    def action_open(self) -> None:
        """Open the run of the process under the cursor, or the process itself."""
        process = self._selected_process()
        if process is None:
            self.gputrain_app.show_toast("No process is under the cursor")
        else:
            self.open_process(process)

"""Home: what the GPUs of this host do, who is on them, and which runs there are."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.gpus.snapshot import Gpu, Process, Snapshot
from engine.utils.text import counted, printable
from tui.keymap import MONITOR, Command
from tui.pollers import HostLoad
from tui.screens.base import AppServices, CockpitScreen
from tui.screens.dialogs import Choice
from tui.text.gpus import GIB, Marks, gpu_lines, no_driver, process_lines, processes_of, sparkline, title_words
from tui.text.palette import BAD, MUTED
from tui.text.run_lines import name_columns, run_line
from tui.text.runs import RunRow
from tui.widgets.lines import Lines, Row

KEPT_LOOKS = 32
SIGNALS = (
    (signal.SIGTERM, "ask it to end"),
    (signal.SIGINT, "as Ctrl-C"),
    (signal.SIGHUP, "as the end of its terminal"),
    (signal.SIGKILL, "end it at once; it can save nothing"),
    (signal.SIGSTOP, "hold it"),
    (signal.SIGCONT, "let it go on"),
)


class MonitorScreen(CockpitScreen):
    COMMANDS_HERE: ClassVar[Sequence[Command]] = MONITOR
    SHOWS_RUNS = True

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._busy: dict[str, deque[float | None]] = {}
        self._load: deque[float | None] = deque(maxlen=KEPT_LOOKS)
        self._drawn: Snapshot | None = None
        self._processes: dict[str, Process] = {}
        self._began: dict[int, float | None] = {}
        """When each of those processes began, as it was first seen."""
        self._went_to_runs = False

    def body(self) -> ComposeResult:
        gpus = Lines(choosing=True, id="gpus", empty=Text("looking …", MUTED))
        gpus.border_title = "GPUs"
        yield gpus
        with Container(id="below"):
            processes = Lines(choosing=True, id="processes", empty=Text("none", MUTED))
            processes.border_title = "Processes"
            yield processes
            runs = Lines(choosing=True, id="runs")
            runs.border_title = "Runs"
            yield runs

    def tick(self) -> None:
        snapshot = self.cockpit.gpu_poller.snapshot
        self._remember(snapshot)
        self._show_gpus(snapshot)
        self._show_processes(snapshot)
        rows = self.cockpit.run_list_poller.rows
        self._show_runs(rows)
        live = sum(row.live for row in rows or [])
        right = f"{counted(live, 'run')} live   {1 / self.cockpit.intervals.look:g} Hz " if rows is not None else ""
        self.show_title(title_words(snapshot) if snapshot is not None else "", right)

    def _remember(self, snapshot: Snapshot | None) -> None:
        if snapshot is None or snapshot is self._drawn:
            return
        self._drawn = snapshot
        for gpu in snapshot.gpus:
            if gpu.uuid is not None:
                self._busy.setdefault(gpu.uuid, deque(maxlen=KEPT_LOOKS)).append(gpu.value("busy"))
        if (load := self.cockpit.gpu_poller.host) is not None:
            self._load.append(load.cpu)

    def _show_gpus(self, snapshot: Snapshot | None) -> None:
        lines = self.query_one("#gpus", Lines)
        problem = self.cockpit.gpu_poller.problem or self.cockpit.gpu_poller.fault
        if problem is not None:
            lines.show_texts([Text(printable(problem), BAD)])
        elif snapshot is not None and snapshot.gpus:
            marks = Marks(self.cockpit.picked_gpu_uuids, {uuid: list(values) for uuid, values in self._busy.items()})
            head, *texts = gpu_lines(snapshot, lines.size.width, marks)
            rows = [Row(gpu.uuid or f"#{gpu.index}", text) for gpu, text in zip(snapshot.gpus, texts, strict=True)]
            lines.show(rows, [head])
        elif snapshot is not None:
            if lines.has_focus and not self._went_to_runs:
                self._went_to_runs = True
                self.query_one("#runs").focus()
            lines.show_texts(self._without_gpu(snapshot, lines.size.width))

    def _without_gpu(self, snapshot: Snapshot, width: int) -> list[Text]:
        texts = [Text(line) for line in _wrapped(no_driver(snapshot), width)]
        load = self.cockpit.gpu_poller.host
        return [*texts, host_line(load, list(self._load))] if load is not None else texts

    def _show_processes(self, snapshot: Snapshot | None) -> None:
        panel = self.query_one("#processes", Lines)
        panel.display = snapshot is not None and bool(snapshot.gpus)
        if snapshot is None or not panel.display:
            self._processes, self._began = {}, {}
            return
        wanted = self.filter_text
        found = [(gpu, one) for gpu, one in processes_of(snapshot) if not wanted or (one and _holds(wanted, gpu, one))]
        head, *texts = process_lines(found, panel.size.width)
        keys = [f"{gpu.index}/{one.pid if one else ''}" for gpu, one in found]
        self._processes = {key: one for key, (_, one) in zip(keys, found, strict=True) if one is not None}
        self._began = {one.pid: self._began.get(one.pid) or _start_of(one.pid) for one in self._processes.values()}
        panel.show([Row(key, text) for key, text in zip(keys, texts, strict=True)], [head])

    def _show_runs(self, rows: list[RunRow] | None) -> None:
        panel = self.query_one("#runs", Lines)
        problem = printable(self.cockpit.run_list_poller.problem or self.cockpit.run_list_poller.fault or "")
        none = "no run holds this text" if self.filter_text else "no runs yet; n starts one"
        empty = Text(problem or none if rows is not None else "looking …", MUTED)
        wanted = self.filter_text
        shown = [row for row in rows or [] if wanted in row.name.lower() or wanted in row.state]
        width = name_columns(shown, panel.size.width)
        panel.show([Row(row.folder, run_line(row, width)) for row in shown], empty=empty)

    def action_pick(self) -> None:
        lines = self.query_one("#gpus", Lines)
        snapshot = self.cockpit.gpu_poller.snapshot
        if lines.key is None or snapshot is None or not snapshot.gpus:
            self.cockpit.show_toast("there is no GPU to pick: training uses the CPU")
            return
        self.cockpit.picked_gpu_uuids ^= {lines.key}
        self._show_gpus(snapshot)

    def action_open(self) -> None:
        if (key := self.query_one("#runs", Lines).key) is not None:
            self.cockpit.open_run(key)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        if event.lines.id == "gpus":
            self.action_pick()
        elif event.lines.id == "runs":
            self.cockpit.open_run(event.key)
        else:
            self.action_signal()

    def action_signal(self) -> None:
        panel = self.query_one("#processes", Lines)
        one = self._processes.get(panel.key or "")
        if one is None:
            self.cockpit.show_toast("there is no process to send a signal to")
            return
        if self.cockpit.demo_notice:
            self.cockpit.show_toast("this process is made up")
            return
        what = printable(f"{one.pid}  {one.user.value or '?'}  {one.command.value or '?'}")
        note = (
            f"It is rank {one.rank} of {one.run}: stopping the run on its own screen loses nothing." if one.run else ""
        )
        rows = [Row(str(int(number)), Text(f"{number.name:<8} {told}")) for number, told in SIGNALS]
        began = self._began.get(one.pid)

        def send(number: str | None) -> None:
            if number is not None:
                self._send(one.pid, began, int(number))

        self.app.push_screen(Choice(f"signal to {what}"[:60], rows, printable(note)), send)

    def _send(self, pid: int, began: float | None, number: int) -> None:
        name = signal.Signals(number).name
        # Between the question and the answer the number can have become another process's.
        if began is None or _start_of(pid) != began:
            self.cockpit.show_toast(f"process {pid} is not here any more, or runs in another container", warning=True)
            return
        try:
            os.kill(pid, number)
        except OSError as error:
            self.cockpit.show_toast(f"{name} to process {pid}: {error.strerror}", warning=True)
            return
        self.cockpit.show_toast(f"{name} sent to process {pid}")


def host_line(load: HostLoad, history: Sequence[float | None]) -> Text:
    memory = f"memory {load.memory_used / GIB:.1f}/{load.memory_total / GIB:.1f} GiB"
    return Text(f"CPU {load.cpu:3.0f}% {sparkline(history[-16:]):<16}  {memory}", no_wrap=True)


def _holds(wanted: str, gpu: Gpu, one: Process) -> bool:
    told = (str(one.pid), one.user.value or "", one.command.value or "", one.run or "", str(gpu.index))
    return any(wanted in text.lower() for text in told)


def _start_of(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(width, 20))

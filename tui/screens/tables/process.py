"""The tables of a process that is watched: its tree, its GPUs, its runs, and the line above the screen of its run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.base.text import list_names, printable
from engine.base.units import UNKNOWN, format_age, format_bytes, format_percent
from engine.gpus.snapshot import Gpu, GpuProcess
from engine.report.readings import READINGS
from engine.report.table import Align, Column, Shorten, fit
from engine.watch.activity import activity_text, judge
from engine.watch.folders import ForeignRun
from engine.watch.process import HostProcess, ProcessDetails, ProcessTree
from tui.screens.phrases import without_folder
from tui.screens.tables import styled, wrap_text
from tui.terminal.palette import GOOD, MUTED, STRONG, WARNING

MIN_COMMAND_COLUMNS = 20
MAX_STATUS_COMMAND = 40
MAX_SHOWN_FILES = 20
GpuUses = Sequence[tuple[Gpu, GpuProcess]]


def tree_lines(tree: ProcessTree, cpu_percent: Mapping[int, float] | None, uses: GpuUses, width: int) -> list[Text]:
    """Return a header and one line per process, children indented below their parent. Without `cpu_percent`, the use
    of the CPU is not shown."""
    gpus: dict[int, list[tuple[Gpu, GpuProcess]]] = {}
    for use in uses:
        gpus.setdefault(use[1].pid, []).append(use)

    def cpu_text(process: HostProcess) -> str:
        return _percent((cpu_percent or {}).get(process.id.pid))

    def gpu_text(process: HostProcess) -> str:
        return ",".join(str(gpu.index) for gpu, _ in gpus.get(process.id.pid, ()))

    def gpu_memory(process: HostProcess) -> str:
        found = [use.gpu_memory.value for _, use in gpus.get(process.id.pid, ())]
        known = [value for value in found if value is not None]
        return READINGS["gpu_memory"].text(sum(known)) if known else ""

    columns: list[Column[HostProcess]] = [
        Column("pid", "pid", lambda process: str(process.id.pid), Align.RIGHT, priority=9),
        Column("user", "user", lambda process: process.user, priority=5),
        Column("cpu", READINGS["cpu"].title, cpu_text, Align.RIGHT, width=5, priority=8),
        Column("memory", "memory", lambda process: format_bytes(process.memory_bytes), Align.RIGHT, width=8,
               priority=8),
        Column("gpu", "GPU", gpu_text, Align.RIGHT, priority=7, optional=True),
        Column("gpu_memory", "GPU memory", gpu_memory, Align.RIGHT, priority=6, optional=True),
        Column("command", "command", lambda process: "  " * min(process.depth, 8) + without_folder(process.command),
               width=MIN_COMMAND_COLUMNS, priority=9, flex=True),
    ]  # fmt: skip
    if cpu_percent is None:
        columns = [column for column in columns if column.key != "cpu"]
    table = fit(columns, tree.processes, width)
    return [styled(table.header(MUTED)), *(styled(table.line(process)) for process in tree.processes)]


def run_lines(runs: Sequence[ForeignRun], ended_at: float | None, width: int) -> list[Text]:
    """Return one line per run: its name, what it does, and its files. `ended_at` is when its process was missed."""
    now = time.time()

    def state(run: ForeignRun) -> str:
        changed_at = run.changed_at()
        return activity_text(judge(changed_at, now, has_ended=run.has_ended, writer_ended_at=ended_at), changed_at)

    def files(run: ForeignRun) -> str:
        return ", ".join(str(path) for log in run.logs for path in log.files)

    columns: list[Column[ForeignRun]] = [
        Column("name", "run", lambda run: run.name, width=MIN_COMMAND_COLUMNS, priority=9, flex=True),
        Column("state", "state", state, priority=8),
        Column("format", "format", lambda run: ", ".join(run.formats), priority=7),
        Column("files", "files", files, width=MIN_COMMAND_COLUMNS, priority=7, flex=True, shorten=Shorten.MIDDLE),
    ]
    table = fit(columns, runs, width)
    return [styled(table.line(run)) for run in runs]


def gpu_lines(uses: GpuUses) -> list[Text]:
    """Return one line per GPU that is used: its load and memory."""
    shown = {gpu.index: gpu for gpu, _ in uses}
    lines = []
    for index, gpu in sorted(shown.items()):
        parts = [f"GPU {index}", gpu.value("name") or ""]
        for key, limit in (("util", None), ("memory_used", "memory_total"), ("power", "power_limit")):
            if (value := gpu.value(key)) is not None:
                text = READINGS[key].full_text(value, None if limit is None else gpu.value(limit))
                parts.append(f"{READINGS[key].label} {text}")
        lines.append(Text("   ".join(printable(part) for part in parts if part), no_wrap=True, end=""))
    return lines


@dataclass(frozen=True)
class LoadScale:
    """Title of the graph of a load, and the value at its upper end with a label of up to 4 characters."""

    title: str
    top: float
    label: str

    @classmethod
    def fit(cls, key: str, now: float | None, values: Sequence[float | None], uses: GpuUses) -> LoadScale:
        """Return the scale of `cpu`, `memory` or `gpu_memory`, with the value of now in its title. That of GPUs ends at
        what they have, the others above the highest of the past values."""
        known = [value for value in values if value is not None] or [0.0]
        if key == "cpu":
            top = 100 * max(math.ceil(max(known) / 100), 1)
            return cls(f"CPU {_percent(now)}", top, str(top))
        gpus = {gpu.index: gpu.value("memory_total") or 0 for gpu, _ in uses}
        top = sum(gpus.values()) if key == "gpu_memory" else 0
        top = top or 2 ** math.ceil(math.log2(max(*known, 1 << 20)))
        number, unit = format_bytes(top).split()
        name = "memory" if key == "memory" else f"GPU {','.join(map(str, gpus))}"
        return cls(f"{name} {READINGS[key].text(now)}", top, f"{float(number):.0f}{unit[0]}")

    def percent(self, values: Sequence[float | None]) -> list[float | None]:
        """Return values in percent of the upper end."""
        return [None if value is None else 100 * value / self.top for value in values]


def detail_lines(details: ProcessDetails, tree: ProcessTree, width: int) -> list[Text]:
    """Return the working directory, the environment and the command of the root of a tree, and the files that its
    processes write, wrapped."""
    user = tree.processes[0].user if tree.processes else UNKNOWN
    hidden = f"only {user} and root can read it"
    facts = {"folder": hidden if details.cwd is None else details.cwd}
    if not details.environment:
        facts["variables"] = hidden if details.environment is None else "none of training or logging"
    facts |= details.environment or {}
    facts["command"] = details.command
    if tree.files:
        facts["open files"] = ", ".join(map(str, tree.files[:MAX_SHOWN_FILES]))
    names = max(map(len, facts)) + 2
    return [
        Text.assemble((f"{'' if row else name:{names}}", MUTED), line, no_wrap=True, end="")
        for name, value in facts.items()
        for row, line in enumerate(wrap_text(Text(printable(value)), width - names))
    ]


def status_line(
    tree: ProcessTree, uses: GpuUses, cpu_percent: float | None, memory_bytes: int, ended_at: float | None
) -> Text:
    """Return the process in one line: what it is, and what it uses now, or when it ended."""
    state = [(" ● running", GOOD)]
    if ended_at is not None:
        state = [(" ○ ended", STRONG), (f" {format_age(max(time.time() - ended_at, 0.0))} ago", MUTED)]
    text = Text.assemble(*state, no_wrap=True, end="", overflow="ellipsis")
    if not tree.processes:
        return text
    root, memory = tree.processes[0], [process.gpu_memory.value for _, process in uses]
    loads = dict(sorted((gpu.index, format_percent(gpu.value("util"))) for gpu, _ in uses))
    facts = {
        **{f"GPU {index}": load for index, load in loads.items()},
        "GPU memory": READINGS["gpu_memory"].text(sum(filter(None, memory))) if set(memory) - {None} else "",
        "CPU": _percent(cpu_percent),
        "memory": format_bytes(memory_bytes),
    }
    text.append(f"   pid {root.id.pid}")
    for label, value in facts.items() if ended_at is None else ():
        text.append(f"   {label} " if value else "", MUTED).append(value)
    command = without_folder(root.command)
    text.append(f"   {command if len(command) <= MAX_STATUS_COMMAND else command[:MAX_STATUS_COMMAND] + '…'}", MUTED)
    return text


def hidden_text(tree: ProcessTree) -> Text | None:
    """Return what /proc does not show of the tree; None if it shows all."""
    if not tree.is_hidden:
        return None
    users = list_names(list(dict.fromkeys(process.user for process in tree.processes)))
    reason = f"/proc shows open files and working directories of {users} only to that user and to root"
    return Text(reason, WARNING, no_wrap=True, end="")


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else format_percent(value)

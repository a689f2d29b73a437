"""The table of the processes on GPUs: `gputrain gpus --processes`, monitor, GPU screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text

from engine.base.process import user_name
from engine.base.units import UNKNOWN, format_age
from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from engine.report.readings import READINGS
from engine.report.table import Align, Column, fit
from tui.screens.phrases import holder_sentence, idle_note, is_mine, users_text, without_folder
from tui.screens.tables import styled
from tui.screens.tables.gpus import gpu_lines, host_title_line
from tui.terminal.palette import MUTED, STRONG, WARNING

GpuUse = tuple[Gpu, GpuProcess | None]
"""A process on a GPU; None if the processes of the GPU are unknown."""
ORDERS: dict[str, Callable[[GpuUse], tuple[float, ...]]] = {
    "GPU": lambda use: (use[0].index, *_descending(use, "gpu_memory")),
    "GPU memory": lambda use: _descending(use, "gpu_memory"),
    "CPU": lambda use: _descending(use, "cpu"),
    "run time": lambda use: _descending(use, "run_time"),
}
"""What the processes are sorted by, the largest first."""
MIN_COMMAND_COLUMNS = 16
MINE, FREE_MEMORY = "mine", re.compile(r"memory>(\d+(?:\.\d+)?)")
"""Words of a filter: what is this user's, and GPUs with more than that many GiB of free memory."""


def list_gpu_processes(gpus: Sequence[Gpu], order: str = "GPU") -> list[GpuUse]:
    """Return the processes of GPUs, sorted by one of the ORDERS. Unknown ones are behind the known ones."""
    unknown: Sequence[GpuProcess | None] = (None,)
    uses = [(gpu, each) for gpu in gpus for each in (unknown if gpu.processes.value is None else gpu.processes.value)]
    return sorted(uses, key=ORDERS[order])


def _descending(use: GpuUse, key: str) -> tuple[float, ...]:
    """Return what sorts by the value of a process, the largest first, and processes without one last."""
    value = None if use[1] is None else getattr(use[1], key).value
    return (1.0, 0.0) if value is None else (0.0, -float(value))


def process_lines(uses: Sequence[GpuUse], width: int, header_style: str = MUTED) -> list[Text]:
    """Return a header and one line per process. The type is shown if some are not of compute."""

    def column(key: str, title: str, text: Callable[[GpuProcess], str], priority: int, align: Align) -> Column[GpuUse]:
        return Column(key, title, partial(_text_of_process, text), align, priority=priority)

    def reading(key: str, priority: int) -> Column[GpuUse]:
        return column(key, READINGS[key].title, partial(_reading_text, key), priority, Align.RIGHT)

    columns = [
        Column[GpuUse]("gpu", "GPU", _device, Align.RIGHT, priority=9),
        column("pid", "pid", lambda process: str(process.pid), 9, Align.RIGHT),
        column("user", "user", lambda process: process.user.value or "?", 8, Align.LEFT),
        column("type", "type", lambda process: process.kind, 1, Align.LEFT),
        reading("gpu_memory", 7),
        reading("cpu", 6),
        reading("memory", 2),
        column("run_time", "run time", _run_time, 5, Align.RIGHT),
        Column[GpuUse]("note", "note", _note, width=11, priority=9, flex=True, optional=True, style=_note_style),
        Column[GpuUse]("command", "command", _command, width=MIN_COMMAND_COLUMNS, priority=9, flex=True),
    ]
    empty = {"type"} if all(process is None or process.kind == "compute" for _, process in uses) else set()
    empty |= {"run_time"} if all(process is None or process.run_time.value is None for _, process in uses) else set()
    columns = [column for column in columns if column.key not in empty]
    table = fit(columns, uses, width)
    return [styled(line) for line in (table.header(header_style), *map(table.line, uses))]


def gpu_matches(filter_text: str, gpu: Gpu) -> bool:
    """Whether a GPU has all words of a filter, which is in lower case: `mine`, `memory>40` for that many GiB of free
    memory, else a part of its index, its model, its users, or of one of its processes."""
    return all(_gpu_has(word, gpu) for word in filter_text.split())


def _gpu_has(word: str, gpu: Gpu) -> bool:
    if word == MINE:
        return is_mine(gpu)
    if (bound := FREE_MEMORY.fullmatch(word)) is not None:
        used, total = gpu.value("memory_used"), gpu.value("memory_total")
        return used is not None and total is not None and total - used > float(bound[1]) * 2**30
    fields = (gpu.index, gpu.value("name") or "", users_text(gpu))
    return any(word in str(field).lower() for field in fields) or any(
        process_matches(word, gpu, process) for process in gpu.processes.value or ()
    )


def process_matches(filter_text: str, gpu: Gpu, process: GpuProcess) -> bool:
    """Whether a process or its GPU contains all words of a filter, which is in lower case."""
    user, words = process.user.value or "", filter_text.split()
    fields = (process.pid, user, process.command.value or "", process.run or "", gpu.index)
    texts = [str(field).lower() for field in fields]
    return all(user == user_name() if word == MINE else any(word in text for text in texts) for word in words)


def run_words(filter_text: str) -> str:
    """Return the filter without the words that are about GPUs."""
    words = filter_text.split()
    return " ".join(word for word in words if word not in (MINE, "free") and not FREE_MEMORY.fullmatch(word))


def _reading_text(key: str, process: GpuProcess) -> str:
    return READINGS[key].cell_text(getattr(process, key).value)


def _run_time(process: GpuProcess) -> str:
    value = process.run_time.value
    return UNKNOWN if value is None else format_age(value)


def _note(use: GpuUse) -> str:
    """Return for how long a process has been idle."""
    return "" if use[1] is None else idle_note(use[1])


def _note_style(use: GpuUse) -> str:
    return WARNING if _note(use) else MUTED


def holder_lines(snapshot: Snapshot) -> list[Text]:
    """Return one line for each process that holds a GPU and is idle."""
    return [
        Text(f"GPU {gpu.index}: process {process.pid} {sentence}", WARNING)
        for gpu, process in list_gpu_processes(snapshot.gpus)
        if process is not None and (sentence := holder_sentence(process))
    ]


def _text_of_process(text: Callable[[GpuProcess], str], use: GpuUse) -> str:
    return UNKNOWN if use[1] is None else text(use[1])


def _device(use: GpuUse) -> str:
    gpu, process = use
    return str(gpu.index) if process is None or process.instance is None else f"{gpu.index}:{process.instance}"


def _command(use: GpuUse) -> str:
    gpu, process = use
    if process is None:
        return f"unknown: {gpu.processes.reason}"
    command = without_folder(process.command.value or "") or f"? {process.command.reason}"
    return command if process.run is None else f"{process.run} rank {process.rank}: {command}"


def snapshot_lines(snapshot: Snapshot, width: int, *, instances: bool, processes: bool) -> list[Text]:
    """Return the lines of `gputrain gpus`: the GPUs of a host, with their MIG instances and processes if wanted."""
    if not snapshot.gpus:
        return []
    lines = [host_title_line(snapshot), *gpu_lines(snapshot, width, instances=instances)]
    lines += [Text(""), *holders] if (holders := holder_lines(snapshot)) else []
    if processes:
        lines += [Text(""), *process_lines(list_gpu_processes(snapshot.gpus), width, STRONG)]
    return lines

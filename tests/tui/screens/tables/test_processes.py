"""The table of the processes on GPUs: its orders, its filter, and how it names commands."""

from __future__ import annotations

import pytest

from engine.gpus.snapshot import Measurement
from support.replace import replace
from support.screen.demo_app import FROZEN_NOW
from support.screen.holders import holder_snapshot, make_holder
from tui.charts.history import GpuLoads
from tui.screens.tables.gpu_blocks import GpuBlocks, GpuView
from tui.screens.tables.processes import gpu_matches, list_gpu_processes, process_lines

SNAPSHOT = holder_snapshot()


def test_processes_are_sorted_by_gpu_or_the_largest_value_first() -> None:
    def pids(order: str) -> list[int | None]:
        return [process.pid if process else None for _, process in list_gpu_processes(SNAPSHOT.gpus, order)]

    assert pids("GPU")[:4] == [4711, 4712, 4713, 41201]
    by_memory = pids("GPU memory")
    assert by_memory[0] == 4711 and by_memory.index(41204) < by_memory.index(4712)
    assert list_gpu_processes(SNAPSHOT.gpus, "CPU")[0][1].cpu.value > 100  # type: ignore[union-attr]


def test_process_line_has_run_time_and_program_without_its_folder() -> None:
    holder = make_holder(9, "ana", "/opt/env/bin/python train.py", 1, 0.0, run_time=Measurement(7200.0, FROZEN_NOW))
    header, line = (text.plain for text in process_lines([(SNAPSHOT.gpus[0], holder)], 100))
    assert "run time" in header and "2 h" in line and line.rstrip().endswith("  python train.py")
    unknown = replace(holder, run_time=Measurement(None, FROZEN_NOW, "not recorded"))
    assert "run time" not in process_lines([(SNAPSHOT.gpus[0], unknown)], 100)[0].plain


def test_filter_finds_gpus_by_index_user_and_command() -> None:
    def found(query: str) -> list[int]:
        return [gpu.index for gpu in SNAPSHOT.gpus if gpu_matches(query, gpu)]

    assert found("serve.py") == [0] and found("carol") == [6] and 2 in found("free") and found("nobody-here") == []


@pytest.mark.parametrize("width", [57, 76, 80, 120, 160])
def test_warning_of_a_gpu_never_hides_who_uses_it(width: int) -> None:
    slowed = replace(SNAPSHOT.gpus[1], throttle=Measurement(("thermal", "hardware slowdown"), FROZEN_NOW))
    snapshot = replace(SNAPSHOT, gpus=(SNAPSHOT.gpus[0], slowed, *SNAPSHOT.gpus[2:]))
    [line] = GpuBlocks(snapshot, GpuLoads(), GpuView(width, 1, 600.0)).lines(slowed, picked=False)
    assert "61.0/79.6" in line.plain and "fashion-17 rank 1" in line.plain and "slowed: heat" in line.plain

"""How the monitor divides its room between GPUs, processes and runs."""

from __future__ import annotations

from dataclasses import dataclass

FRAME_LINES = 2
HEADER_LINES = 1
# Below this width, the panels are stacked and each GPU has one line.
SIDE_BY_SIDE_MIN_COLUMNS = 100
MAX_GPU_LINES = 8
MIN_LIST_LINES = 4
# Lines below the GPUs, at least, in a terminal of at least `TALL_MIN_LINES` lines and in a smaller one.
TALL_MIN_LINES, BELOW_LINES, SMALL_BELOW_LINES = 30, 13, 7
BELOW_SHARE = 0.4
LOW_MAX_LINES = 16


@dataclass(frozen=True)
class Demand:
    """The size of the body in cells, and the numbers of rows that there are to show. A host without a GPU has a message
    in place of GPUs, and no processes."""

    width: int
    height: int
    gpus: int
    processes: int
    runs: int


@dataclass(frozen=True)
class MonitorLayout:
    """Lines for each GPU, and the height of each panel with its frame; 0 hides it. Processes are beside the
    runs, or all are stacked."""

    side_by_side: bool
    gpu_lines: int
    gpus: int
    processes: int
    runs: int


def arrange(demand: Demand) -> MonitorLayout:
    """Divide the room: the lists get what they need, the graphs get the rest."""
    side_by_side = demand.width >= SIDE_BY_SIDE_MIN_COLUMNS
    gpu_lines, gpus = _gpu_panel(demand, side_by_side)
    below = demand.height - gpus
    if not demand.gpus:
        return MonitorLayout(False, gpu_lines, gpus, 0, below)
    if side_by_side:
        return MonitorLayout(True, gpu_lines, gpus, below, below)
    wanted, wanted_runs = demand.processes + HEADER_LINES + FRAME_LINES, max(demand.runs, 1) + FRAME_LINES
    processes = min(wanted, below - min(wanted_runs, max(below // 2, MIN_LIST_LINES)))
    if below < 2 * MIN_LIST_LINES:
        processes = 0
    return MonitorLayout(False, gpu_lines, gpus, processes, below - processes)


def _gpu_panel(demand: Demand, side_by_side: bool) -> tuple[int, int]:
    """Return the lines for each GPU, and the height of their panel."""
    frame, height = FRAME_LINES + HEADER_LINES, demand.height
    if not demand.gpus:
        return 1, frame + 1
    if side_by_side:
        below = SMALL_BELOW_LINES if height < TALL_MIN_LINES else max(BELOW_LINES, int(BELOW_SHARE * height))
    else:
        # A low terminal has no room for the processes.
        below = 2 * (MIN_LIST_LINES + 1) if height >= LOW_MAX_LINES else MIN_LIST_LINES + 1
    lines = min(max((height - below - frame) // demand.gpus, 1), MAX_GPU_LINES) if side_by_side else 1
    return lines, max(min(demand.gpus * lines + frame, height - below), frame + 1)

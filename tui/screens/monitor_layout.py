"""How the monitor divides its room between GPUs, processes, host and runs."""

from __future__ import annotations

from dataclasses import dataclass

FRAME_LINES = 2
HEADER_LINES = 1
# Below this width, the panels are stacked and each GPU has one line.
SIDE_BY_SIDE_MIN_COLUMNS = 100
MAX_GPU_LINES = 8
MIN_HOST_LINES = 4
MIN_LIST_LINES = 4
MAX_STACKED_HOST_LINES = 9
# Lines below the GPUs, at least, in a terminal of at least `TALL_MIN_LINES` lines and in a smaller one.
TALL_MIN_LINES, BELOW_LINES, SMALL_BELOW_LINES = 30, 13, 7
BELOW_SHARE = 0.4
LOW_MAX_LINES = 16


@dataclass(frozen=True)
class Demand:
    """The size of the body in cells, and the numbers of rows that there are to show."""

    width: int
    height: int
    gpus: int
    processes: int
    runs: int


@dataclass(frozen=True)
class MonitorLayout:
    """Lines for each GPU, and the height of each panel with its frame; 0 hides it. Processes and host are beside the
    runs, or all are stacked."""

    side_by_side: bool
    gpu_lines: int
    gpus: int
    processes: int
    host: int
    runs: int


def arrange(demand: Demand) -> MonitorLayout:
    """Divide the room: the lists get what they need, the graphs get the rest."""
    side_by_side = demand.width >= SIDE_BY_SIDE_MIN_COLUMNS
    gpu_lines, gpus = _gpu_panel(demand, side_by_side) if demand.gpus else (1, 0)
    below = demand.height - gpus
    wanted = demand.processes + HEADER_LINES + FRAME_LINES if demand.gpus or demand.processes else 0
    wanted_runs = max(demand.runs, 1) + FRAME_LINES
    if side_by_side:
        processes, host = min(wanted, below), below - min(wanted, below)
        if wanted and host < MIN_HOST_LINES:
            processes, host = below, 0
        return MonitorLayout(True, gpu_lines, gpus, processes, host, below)
    host = 0
    if not demand.gpus and not demand.runs:
        # The graphs of the host get the room.
        return MonitorLayout(False, gpu_lines, gpus, wanted, below - wanted - wanted_runs, wanted_runs)
    if not demand.gpus:
        host = min(max(below // 3, MIN_HOST_LINES + 1), MAX_STACKED_HOST_LINES)
    elif below - wanted - wanted_runs >= 2 * MAX_STACKED_HOST_LINES:
        host = MAX_STACKED_HOST_LINES
    room = below - host
    processes = min(wanted, room - min(wanted_runs, max(room // 2, MIN_LIST_LINES)))
    if room < 2 * MIN_LIST_LINES:
        processes = 0
    return MonitorLayout(False, gpu_lines, gpus, processes, host, room - processes)


def _gpu_panel(demand: Demand, side_by_side: bool) -> tuple[int, int]:
    """Return the lines for each GPU, and the height of their panel."""
    frame, height = FRAME_LINES + HEADER_LINES, demand.height
    if side_by_side:
        below = SMALL_BELOW_LINES if height < TALL_MIN_LINES else max(BELOW_LINES, int(BELOW_SHARE * height))
    else:
        # A low terminal has no room for the processes.
        below = 2 * (MIN_LIST_LINES + 1) if height >= LOW_MAX_LINES else MIN_LIST_LINES + 1
    lines = min(max((height - below - frame) // demand.gpus, 1), MAX_GPU_LINES) if side_by_side else 1
    return lines, max(min(demand.gpus * lines + frame, height - below), frame + 1)

"""How the monitor divides its room between GPUs, processes and runs."""

from __future__ import annotations

from dataclasses import dataclass

FRAME_LINES = 2
HEADER_LINES = 1
# Below this width, each GPU has one line.
WIDE_MIN_COLUMNS = 100
MAX_GPU_LINES = 8
# More GPUs have one line each, in two columns from this width on.
MAX_TALL_GPUS, TWO_COLUMNS_MIN_WIDTH = 8, 160
MIN_LIST_LINES = 4
# Lines below tall GPUs, at least, in a terminal of at least `TALL_MIN_LINES` lines.
TALL_MIN_LINES, BELOW_LINES = 30, 14
BELOW_SHARE = 0.4
LOW_MAX_LINES = 16
# With less, the GPUs and the runs have the room of the processes, which enter on a GPU shows.
PROCESSES_MIN_LINES = 20
MESSAGE_LINES = 6  # that there is no GPU, and what can be done without one


@dataclass(frozen=True)
class Demand:
    """The size of the body in cells, and the numbers of GPUs and processes. A host without a GPU has a message in place
    of GPUs, and no processes. `folded` GPUs are free and have one line each. `gpus` may be lines of a list, such as
    those of several hosts, which are one below the other."""

    width: int
    height: int
    gpus: int
    processes: int
    is_list: bool = False
    folded: int = 0


@dataclass(frozen=True)
class MonitorLayout:
    """Lines for each GPU that is in use, and the height of each panel with its frame; 0 hides it. With two
    `gpu_columns`, there are two panels of GPUs side by side."""

    gpu_lines: int
    gpus: int
    processes: int
    runs: int
    gpu_columns: int = 1


def arrange(demand: Demand) -> MonitorLayout:
    """Divide the room: the lists get what they need, the graphs get the rest."""
    has_two = demand.gpus > MAX_TALL_GPUS and demand.width >= TWO_COLUMNS_MIN_WIDTH and not demand.is_list
    columns = 2 if has_two else 1
    gpu_lines, gpus = _gpu_panel(demand, -(-demand.gpus // columns))
    below = demand.height - gpus
    if not demand.gpus:
        return MonitorLayout(gpu_lines, gpus, 0, below)
    # The number of runs moves nothing.
    wanted = demand.processes + HEADER_LINES + FRAME_LINES
    processes = min(wanted, below // 2) if below >= 2 * MIN_LIST_LINES else 0
    return MonitorLayout(gpu_lines, gpus, processes, below - processes, columns)


def _gpu_panel(demand: Demand, rows: int) -> tuple[int, int]:
    """Return the lines for each GPU, and the height of a panel with `rows` of them."""
    frame, height = FRAME_LINES + HEADER_LINES, demand.height
    if not demand.gpus:
        return 1, FRAME_LINES + (MESSAGE_LINES if height >= LOW_MAX_LINES else 2)
    least = 2 * (MIN_LIST_LINES + 1) if height >= PROCESSES_MIN_LINES else MIN_LIST_LINES + 1
    below = max(BELOW_LINES, int(BELOW_SHARE * height)) if height >= TALL_MIN_LINES else least
    lines = 1
    if demand.width >= WIDE_MIN_COLUMNS and demand.gpus <= MAX_TALL_GPUS and not demand.is_list:
        lines = min(max((height - below - frame) // rows, 1), MAX_GPU_LINES)
    # The lines of a GPU stay the same when another one becomes free.
    wanted = rows * lines - demand.folded * (lines - 1) + frame
    return lines, max(min(wanted, height - (below if lines > 1 else least)), frame + 1)

"""Where the panels of the screen of a run are at each size of the terminal. `tui.screens.run_panels` applies it."""

from __future__ import annotations

from dataclasses import dataclass

GRID_COLUMNS, MAX_CHARTS = 12, 16
CHART_PANELS = tuple(f"chart-{number}" for number in range(MAX_CHARTS))
RANKS_PANEL, LOG_PANEL = "ranks", "log"
# From these widths, two and three charts are beside each other.
COLUMN_WIDTHS = (80, 140)
# From this size, the ranks are beside charts for which there is no other place.
MIN_COLUMNS_BESIDE, MIN_ROWS_BESIDE, SPAN_BESIDE, MIN_ROWS_OF_RANKS = 100, 26, 4, 6
MIN_CHART_ROWS, MIN_LOG_ROWS, MIN_ROWS_WITH_LOG = 8, 4, 17
FRAME_ROWS, HEADER_ROWS = 2, 1
MAX_ROWS_PER_RANK = 3
# The panel of the ranks scrolls only if there are more of them, or if charts would be too low.
VISIBLE_RANKS = 4


@dataclass(frozen=True)
class Layout:
    """Panels of a screen in a grid of `GRID_COLUMNS` columns.

    Charts of one slot share a place. `rows` are the heights of the grid rows, `spans` the columns of each panel; one
    without columns is hidden.
    """

    slots: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    spans: dict[str, int]
    rows_per_rank: int = 1


@dataclass(frozen=True)
class RunRoom:
    """What the layout depends on: cells for the panels; number of charts, of ranks or GPUs, and of log lines; whether
    the past load of the ranks is known."""

    width: int = 0
    height: int = 0
    charts: int = 1
    ranks: int = 0
    log_lines: int = 0
    has_loads: bool = False

    @property
    def max_per_rank(self) -> int:
        """Lines of a rank at most."""
        return MAX_ROWS_PER_RANK if self.has_loads else 1


def run_layout(room: RunRoom, *, full: bool = False) -> Layout:
    """Return the layout; with `full`, of a single chart. Charts that have no place of their own take turns in others.

    Without charts, the log has their place.
    """
    charts, height = CHART_PANELS[: room.charts], room.height
    if full and charts:
        return Layout((charts,), ("1fr",), dict.fromkeys(charts, GRID_COLUMNS))
    per_rank, rank_rows = _rank_rows(room)
    below = {RANKS_PANEL: rank_rows} if rank_rows else {}
    spans = {RANKS_PANEL: GRID_COLUMNS, LOG_PANEL: GRID_COLUMNS}
    if not charts:
        rows = (*map(str, below.values()), "1fr")
        return Layout((), rows, dict.fromkeys((*below, LOG_PANEL), GRID_COLUMNS), per_rank)
    columns = min(1 + sum(room.width >= width for width in COLUMN_WIDTHS), len(charts))
    if len(charts) == 4:
        columns = min(columns, 2)
    chart_rows = max((height - rank_rows - MIN_LOG_ROWS) // MIN_CHART_ROWS, 1)
    places = columns * min(chart_rows, -(-len(charts) // columns))
    chart_spans = [GRID_COLUMNS // columns] * min(places, len(charts))
    # The last chart fills its row.
    chart_spans[-1] += chart_spans[0] * (places - len(chart_spans))
    if places == columns < len(charts) and rank_rows and room.width >= MIN_COLUMNS_BESIDE and height >= MIN_ROWS_BESIDE:
        # Further charts are beside the ranks.
        chart_spans.append(SPAN_BESIDE)
        spans[RANKS_PANEL] -= SPAN_BESIDE
        per_rank = min(max(MIN_ROWS_OF_RANKS // room.ranks, 1), room.max_per_rank)
        below[RANKS_PANEL] = min(max(room.ranks * per_rank + HEADER_ROWS, 5), 10) + FRAME_ROWS
    rest = height - sum(below.values()) - MIN_CHART_ROWS * (places // columns)
    log_rows = min(max(height // 5, MIN_LOG_ROWS), room.log_lines + FRAME_ROWS, rest)
    if log_rows > FRAME_ROWS and height >= MIN_ROWS_WITH_LOG:
        below[LOG_PANEL] = log_rows
    # The first charts are the most important ones.
    rows = ("3fr", *["2fr"] * (places // columns - 1), *map(str, below.values()))
    slots = tuple(charts[place :: len(chart_spans)] for place in range(len(chart_spans)))
    shown = {chart: span for slot, span in zip(slots, chart_spans, strict=True) for chart in slot}
    return Layout(slots, rows, shown | {panel: spans[panel] for panel in below}, per_rank)


def _rank_rows(room: RunRoom) -> tuple[int, int]:
    """Return the lines of each rank, and the height of their panel; 0 hides it."""
    if not room.ranks:
        return 1, 0
    budget = room.height // 4 - FRAME_ROWS - HEADER_ROWS
    per_rank = min(max(budget // room.ranks, 1), room.max_per_rank)
    most = max(room.height // 3 - FRAME_ROWS, min(HEADER_ROWS + VISIBLE_RANKS, room.height - 15), 2)
    return per_rank, min(room.ranks * per_rank + HEADER_ROWS, most) + FRAME_ROWS

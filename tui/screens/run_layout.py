"""Where the panels of the run screen are at each size of the terminal. `tui.screens.run_panels` applies it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.show.charts import Place, charts_of

GRID_COLUMNS = 12
CHARTS = tuple(chart.id for chart in charts_of(Place.RUN))
# Narrower terminals have one chart beside another only from this width.
MIN_COLUMNS_OF_TWO_CHARTS = 80
# From this height, charts have two rows.
MIN_ROWS_OF_FOUR_CHARTS = 26
# Between these sizes, the ranks are beside the learning rate.
MIN_COLUMNS_OF_RANKS_BESIDE, MAX_COLUMNS_OF_RANKS_BESIDE, MAX_ROWS_OF_RANKS_BESIDE = 100, 150, 36
MIN_CHART_ROWS = 8
MIN_ROWS_WITH_LOG = 17
FRAME_ROWS, HEADER_ROWS = 2, 1
MAX_ROWS_PER_RANK = 3
# The panel of the ranks scrolls only if there are more of them, or if charts would be too low.
VISIBLE_RANKS = 4


@dataclass(frozen=True)
class Layout:
    """Panels of the run screen in a grid of `GRID_COLUMNS` columns.

    Charts of one slot share a place. `rows` are the heights of the grid rows, `spans` the columns of each slot, of
    "ranks" and of "log"; a panel without columns is hidden.
    """

    slots: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    slot_spans: tuple[int, ...]
    spans: dict[str, int] = field(default_factory=dict)
    rows_per_rank: int = 1

    def span_of(self, panel: str) -> int:
        """Return the columns of a panel, 0 if it is hidden."""
        for slot, span in zip(self.slots, self.slot_spans, strict=True):
            if panel in slot:
                return span
        return self.spans.get(panel, 0)


@dataclass(frozen=True)
class PanelRoom:
    """What the layout depends on: cells below the progress, number of ranks (at least 1) and of log lines, and whether
    the journal has gradient norms and the past load of the ranks."""

    width: int
    height: int
    ranks: int
    log_lines: int
    has_grad_norm: bool = True
    has_loads: bool = True


def run_layout(room: PanelRoom, *, full: bool = False) -> Layout:
    """Return the layout; with `full`, of a single chart."""
    charts = tuple(chart for chart in CHARTS if room.has_grad_norm or chart != "grad_norm")
    if full:
        return Layout((charts,), ("1fr",), (GRID_COLUMNS,))
    width, height, ranks, log_lines = room.width, room.height, room.ranks, room.log_lines
    max_per_rank = MAX_ROWS_PER_RANK if room.has_loads else 1
    beside = width >= MIN_COLUMNS_OF_RANKS_BESIDE and (
        not room.has_grad_norm or (height < MAX_ROWS_OF_RANKS_BESIDE and width < MAX_COLUMNS_OF_RANKS_BESIDE)
    )
    if beside and height >= MIN_ROWS_OF_FOUR_CHARTS:
        log = _log_rows(height // 5, log_lines)
        per_rank = min(max(6 // ranks, 1), max_per_rank)
        below = min(max(ranks * per_rank + HEADER_ROWS, 5), 10) + FRAME_ROWS
        return Layout(
            slots=(("loss",), ("accuracy",), charts[2:]),
            rows=("1fr", str(below), str(log)),
            slot_spans=(6, 6, 4),
            spans={"ranks": 8, "log": 12},
            rows_per_rank=per_rank,
        )
    slots, span = _stacked_slots(width, height, charts)
    chart_rows = ["3fr", *["2fr"] * (-(-len(slots) * span // GRID_COLUMNS) - 1)]
    budget = height // 4 - FRAME_ROWS - HEADER_ROWS
    per_rank = min(max(budget // ranks, 1), max_per_rank)
    max_rank_rows = max(height // 3 - FRAME_ROWS, min(HEADER_ROWS + VISIBLE_RANKS, height - 15), 2)
    rank_rows = min(ranks * per_rank + HEADER_ROWS, max_rank_rows) + FRAME_ROWS
    rows, spans = [*chart_rows, str(rank_rows)], {"ranks": 12}
    rest = height - rank_rows - MIN_CHART_ROWS * len(chart_rows)
    if height >= MIN_ROWS_WITH_LOG and rest >= 4:
        rows.append(str(min(_log_rows(height // 5, log_lines), rest)))
        spans["log"] = 12
    return Layout(slots, tuple(rows), (span,) * len(slots), spans, per_rank)


def _stacked_slots(width: int, height: int, charts: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return the slots above the ranks, and the columns of each."""
    if width >= MIN_COLUMNS_OF_TWO_CHARTS:
        if height >= MIN_ROWS_OF_FOUR_CHARTS and len(charts) == len(CHARTS):
            return tuple((chart,) for chart in charts), 6
        return (("loss", *charts[2:3]), ("accuracy", *charts[3:])), 6
    count = min(max((height - 10) // 10, 1), len(charts))
    return (*((chart,) for chart in charts[: count - 1]), charts[count - 1 :]), GRID_COLUMNS


def _log_rows(wanted: int, lines: int) -> int:
    """Return the height of the log panel: as many lines as there are, within limits."""
    return min(max(wanted, 4), max(lines + FRAME_ROWS, 3))

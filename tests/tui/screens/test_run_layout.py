"""Layout of the screen of a run at each size."""

from __future__ import annotations

import pytest

from tui.screens.run_layout import CHART_PANELS, FRAME_ROWS, GRID_COLUMNS, HEADER_ROWS, MAX_CHARTS, RunRoom, run_layout

MIN_PANEL_ROWS = 3


@pytest.mark.parametrize("charts", [1, 3, 4, MAX_CHARTS])
@pytest.mark.parametrize("ranks", [0, 1, 64])
@pytest.mark.parametrize("size", [(60, 12), (99, 44), (120, 26), (200, 56)])
def test_run_layout_leaves_room_for_every_row_and_chart(size: tuple[int, int], ranks: int, charts: int) -> None:
    layout = run_layout(RunRoom(*size, charts, ranks, 100, has_loads=True))
    fixed = sum(int(row) for row in layout.rows if not row.endswith("fr"))
    flexible = [row for row in layout.rows if row.endswith("fr")]
    assert flexible and size[1] - fixed >= MIN_PANEL_ROWS * len(flexible) + 2
    assert all(int(row) >= MIN_PANEL_ROWS for row in layout.rows if row not in flexible)
    beside = GRID_COLUMNS - layout.spans.get("ranks", GRID_COLUMNS)
    assert sum(layout.spans[slot[0]] for slot in layout.slots) == GRID_COLUMNS * len(flexible) + beside
    assert sorted(panel for slot in layout.slots for panel in slot) == sorted(CHART_PANELS[:charts])


@pytest.mark.parametrize("size", [(80, 20), (160, 44)])
def test_run_layout_shows_four_ranks_without_scrolling(size: tuple[int, int]) -> None:
    layout = run_layout(RunRoom(*size, 4, 4, 100, has_loads=True))
    panel = int(layout.rows[-2])
    assert panel - FRAME_ROWS - HEADER_ROWS >= 4 * layout.rows_per_rank

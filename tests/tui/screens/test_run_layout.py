"""Layout of the run screen at each size."""

from __future__ import annotations

import pytest

from tui.screens.run_layout import CHARTS, FRAME_ROWS, HEADER_ROWS, PanelRoom, run_layout

MIN_PANEL_ROWS = 3


@pytest.mark.parametrize("ranks", [1, 64])
@pytest.mark.parametrize(("size", "has_grad_norm"), [((60, 12), True), ((99, 44), False), ((200, 56), True)])
def test_run_layout_leaves_room_for_every_row(size: tuple[int, int], has_grad_norm: bool, ranks: int) -> None:
    width, height = size
    layout = run_layout(PanelRoom(width, height, ranks, 100, has_grad_norm))
    fixed = sum(int(row) for row in layout.rows if not row.endswith("fr"))
    flexible = [row for row in layout.rows if row.endswith("fr")]
    assert flexible and height - fixed >= MIN_PANEL_ROWS * len(flexible) + 2
    assert all(int(row) >= MIN_PANEL_ROWS for row in layout.rows if row not in flexible)
    assert sum(layout.slot_spans) % 12 == 0 or layout.slot_spans == (6, 6, 4)
    assert sorted(chart for slot in layout.slots for chart in slot) == sorted(
        CHARTS[: len(CHARTS) - (not has_grad_norm)]
    )


@pytest.mark.parametrize("size", [(80, 20), (160, 44)])
def test_run_layout_shows_four_ranks_without_scrolling(size: tuple[int, int]) -> None:
    layout = run_layout(PanelRoom(*size, 4, 100))
    panel = int(layout.rows[-2])
    assert panel - FRAME_ROWS - HEADER_ROWS >= 4 * layout.rows_per_rank

"""How the monitor divides its room."""

from __future__ import annotations

import itertools

import pytest

from tui.screens.monitor_layout import FRAME_LINES, HEADER_LINES, Demand, arrange

SIZES = [(60, 13), (120, 32), (200, 58), (100, 90)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_arrange_fills_the_room(size: tuple[int, int]) -> None:
    for gpus, processes in itertools.product((0, 1, 2, 4, 8, 16), (0, 1, 9, 100)):
        layout = arrange(Demand(*size, gpus, processes))
        assert layout.gpus + layout.processes + layout.runs == size[1]
        assert layout.processes == 0 or layout.processes > FRAME_LINES
        assert layout.runs >= 3


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [(160, 46), (200, 58)], ids=str)
def test_arrange_gives_gpus_several_lines_without_blank_rest(size: tuple[int, int], gpus: int) -> None:
    layout = arrange(Demand(*size, gpus, 6))
    assert layout.gpu_lines >= 3
    assert layout.gpus == gpus * layout.gpu_lines + HEADER_LINES + FRAME_LINES


def test_arrange_gives_room_of_free_gpus_to_the_lists() -> None:
    busy, mixed, idle = (arrange(Demand(160, 46, 8, 6, folded=folded)) for folded in (0, 3, 8))
    assert busy.gpu_lines == mixed.gpu_lines == idle.gpu_lines == 3
    assert (busy.gpus - mixed.gpus, idle.gpus) == (6, 8 + HEADER_LINES + FRAME_LINES)
    assert idle.runs > mixed.runs > busy.runs


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_arrange_without_gpus_gives_room_to_runs(size: tuple[int, int]) -> None:
    layout = arrange(Demand(*size, 0, 0))
    assert (layout.processes, layout.runs) == (0, size[1] - layout.gpus) and layout.gpus <= 8


@pytest.mark.parametrize(("size", "columns"), [((120, 32), 1), ((160, 46), 2), ((220, 58), 2)], ids=str)
def test_arrange_gives_many_gpus_one_line_each_all_in_view(size: tuple[int, int], columns: int) -> None:
    layout = arrange(Demand(*size, 16, 14))
    assert (layout.gpu_lines, layout.gpu_columns) == (1, columns)
    assert layout.gpus == 16 // columns + HEADER_LINES + FRAME_LINES


def test_arrange_shows_eight_gpus_in_the_smallest_terminal() -> None:
    layout = arrange(Demand(60, 18, 8, 5))
    assert (layout.gpus, layout.processes) == (8 + HEADER_LINES + FRAME_LINES, 0)

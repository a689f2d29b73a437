"""Profiles as lines: they fit the terminal, are readable without color, and escape what a file says."""

from __future__ import annotations

import pytest

from engine.base.codec import replace
from engine.runs.profile_file import PartTime
from support.runs.profiles import FAST_RANK, SLOW_RANK, make_profile, make_rank_profile
from tui.screens.tables.profile import PART_SIGNS, profile_lines, trace_lines


def shown(*lines: object) -> list[str]:
    return [str(line) for line in lines]


@pytest.mark.parametrize("width", [56, 80, 200])
def test_profile_fits_the_terminal(width: int) -> None:
    ranks = [make_rank_profile(rank, SLOW_RANK if rank else FAST_RANK) for rank in range(12)]
    profile = make_profile(*ranks, note="the epoch ended and this is a rather long note about why it did", requested=99)
    assert max(line.cell_len for line in profile_lines(profile, width)) <= width


def test_only_the_ranks_with_the_most_work_are_shown_of_many() -> None:
    ranks = [make_rank_profile(rank, (1.0, 69.0, 90.0, 2.0, 1.0) if rank == 70 else FAST_RANK) for rank in range(100)]
    text = "\n".join(shown(*profile_lines(make_profile(*ranks), 80)))
    assert "rank 70" in text
    assert "84 ranks with shorter steps not shown" in text


def test_text_from_the_file_is_escaped() -> None:
    rank = make_rank_profile(0, device="\x1b]0;x\x07", problem="\x1b[31m", trace="")
    profile = make_profile(rank, note="\x1b[2J", device_type="cuda")
    lines = (*profile_lines(profile, 80), *trace_lines(profile, "/runs/a/profile/step-00000120"))
    assert "\x1b" not in "".join(shown(*lines))


def test_profile_without_any_time_is_shown() -> None:
    nothing = {part: PartTime(mean=0.0, median=0.0) for part in PART_SIGNS}
    rank = replace(make_rank_profile(0), steps=[0.0], parts=nothing)
    assert "rank 0" in "\n".join(shown(*profile_lines(make_profile(rank), 80)))


def test_bar_ends_with_the_line_if_parts_exceed_the_step() -> None:
    endless = {part: PartTime(mean=1e9, median=1e9) for part in PART_SIGNS}
    rank = replace(make_rank_profile(0), steps=[1e-9], parts=endless)
    bar = next(line for line in shown(*profile_lines(make_profile(rank), 80)) if line.startswith("rank 0"))
    assert len(bar) == 80

"""A profile of training steps as lines: a bar per rank, and the parts in milliseconds.

The CLI prints them, the profile screen shows them. Each part has a character of its own beside its color.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from engine.base.text import pluralize, printable
from engine.base.units import format_share
from engine.report.table import Align, Column, fit, pad
from tui.screens.tables import styled, wrap_text
from tui.terminal.palette import ACCENT, MUTED, STRONG, WARNING, series_style

if TYPE_CHECKING:
    from engine.runs.profile_file import Part, Profile, RankProfile

# Character and style of each part of a step.
PART_SIGNS: dict[Part, tuple[str, str]] = {
    "data": ("░", series_style(6)),
    "forward": ("█", series_style(1)),
    "backward": ("▓", series_style(3)),
    "optimizer": ("=", series_style(7)),
    "other": ("·", MUTED),
}
STEP_COLUMNS = 10
# Of more ranks, those with the longest steps are shown.
MAX_SHOWN_RANKS = 16


def profile_lines(profile: Profile, width: int) -> list[Text]:
    """Return all lines of a profile, at most `width` columns wide where words allow it."""
    from engine.runs.profile_file import diagnose_profile

    ranks = shown_ranks(profile)
    lines = [*wrap_text(Text(diagnose_profile(profile), STRONG), width), *_header(profile, width), Text()]
    lines += [_bar_line(rank, ranks, width) for rank in ranks]
    if len(ranks) < len(profile.ranks):
        more = len(profile.ranks) - len(ranks)
        lines.append(Text(f"{pluralize(more, 'rank')} with shorter steps not shown", MUTED))
    total = max(sum(rank.step_seconds for rank in ranks), 1e-9)
    shares = {part: format_share(sum(rank.mean(part) for rank in ranks) / total) for part in PART_SIGNS}
    legend = (span for part, signed in PART_SIGNS.items() for span in (signed, f" {part} {shares[part]}  "))
    return [*lines, *wrap_text(Text.assemble(*legend), width), Text(), *_part_table(ranks, width)]


def shown_ranks(profile: Profile) -> list[RankProfile]:
    """Return the ranks to show, in their order."""
    chosen = sorted(profile.ranks, key=lambda rank: -rank.step_seconds)[:MAX_SHOWN_RANKS]
    return sorted(chosen, key=lambda rank: rank.rank)


def _header(profile: Profile, width: int) -> list[Text]:
    devices = "the CPU" if profile.device_type == "cpu" else printable(profile.ranks[0].device)
    line = Text(
        f"{pluralize(profile.steps, 'step')} from step {profile.step} on (epoch {profile.epoch}), "
        f"{pluralize(len(profile.ranks), 'rank')} on {devices}, {pluralize(profile.batch_size, 'image')} per rank"
    )
    if profile.note:
        requested = f"; {pluralize(profile.requested, 'step')} requested" if profile.steps < profile.requested else ""
        line.append(f"{requested}: {printable(profile.note)}", WARNING)
    return wrap_text(line, width)


def _bar_line(rank: RankProfile, ranks: Sequence[RankProfile], width: int) -> Text:
    """Return the bar of a rank, as long as its step beside that of the slowest rank."""
    label_columns = max(len(f"rank {other.rank}") for other in ranks) + 1
    columns = max(width - label_columns - STEP_COLUMNS - 1, 10)
    longest = max(other.step_seconds for other in ranks)
    line = Text(pad(f"rank {rank.rank}", label_columns), no_wrap=True, overflow="crop", end="")
    drawn, seconds = 0, 0.0
    for part, (sign, style) in PART_SIGNS.items():
        seconds += rank.mean(part)
        # Rounded sums, so that rounding errors do not add up. In a file of somebody else they may exceed the step.
        end = min(round(seconds / max(longest, 1e-9) * columns), columns)
        line.append(sign * (end - drawn), style)
        drawn = max(end, drawn)
    line.append(" " * (columns - drawn))
    return line.append(f" {pad(_ms(rank.step_seconds), STEP_COLUMNS - 3, Align.RIGHT)} ms")


def _part_table(ranks: Sequence[RankProfile], width: int) -> list[Text]:
    """Return the mean of each part in milliseconds."""
    columns: list[Column[RankProfile]] = [
        Column("ms", "mean ms", lambda rank: f"rank {rank.rank}"),
        *(Column(part, part, _part_cell(part), Align.RIGHT) for part in PART_SIGNS),
        Column("step", "step", lambda rank: _ms(rank.step_seconds), Align.RIGHT),
    ]
    table = fit(columns, ranks, width, gap=" ")
    return [styled(table.header(MUTED)), *(styled(table.line(rank)) for rank in ranks)]


def _part_cell(part: Part) -> Callable[[RankProfile], str]:
    return lambda rank: _ms(rank.mean(part))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def trace_lines(profile: Profile, folder: str) -> list[Text]:
    """Return where the traces are, and why a rank has none."""
    traces = [rank for rank in profile.ranks if rank.trace]
    lines = []
    if traces:
        names = printable(f"{folder}/{traces[0].trace}")
        more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
        lines.append(Text(f"Each operation, in https://ui.perfetto.dev: {names}{more}", ACCENT))
    problems = [rank for rank in profile.ranks if rank.problem]
    if problems:
        lines.append(Text(f"rank {problems[0].rank} has no trace: {printable(problems[0].problem)}", WARNING))
    return lines

"""A profile of training steps as lines: a bar per rank, the parts in milliseconds, operators and the input.

The CLI prints them, the profile screen shows them. Each part has a character of its own beside its color.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from engine.show.table import Align, Column, Row, Shorten, fit, pad
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_count, format_share
from tui.palette import ACCENT, MUTED, STRONG, WARNING, series_style
from tui.tables import styled, wrap_text

if TYPE_CHECKING:
    from engine.runs.profile_file import InputTimes, Operator, Part, Profile, RankProfile

# Character and style of each part of a step.
PART_SIGNS: dict[Part, tuple[str, str]] = {
    "data": ("░", series_style(6)),
    "copy": ("▒", series_style(5)),
    "forward": ("█", series_style(1)),
    "backward": ("▓", series_style(3)),
    "allreduce": ("╳", series_style(2)),
    "optimizer": ("=", series_style(7)),
    "other": ("·", MUTED),
}
STEP_COLUMNS = 10
# Of more ranks, those with the most work of their own are shown.
MAX_SHOWN_RANKS = 16
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS = 10, 60
# From this width on, the title of the operators says what their times are.
MIN_KIND_COLUMNS = 72
# Columns that a narrow terminal does not show, the first one to go first. All others have the next priority.
NARROW_WITHOUT = ("unprofiled", "copy", "other")
INPUT_TITLE = "Input: time per image over all threads, and the number of batches that were ready"
WITHOUT_STAGES = "The input has no stages to time"
WITHOUT_KERNELS = (
    "The trace has no GPU kernels (CUPTI is not available): copy and all-reduce are in the times of the other parts"
)


def profile_lines(profile: Profile, width: int) -> list[Text]:
    """Return all lines of a profile, at most `width` columns wide where words allow it."""
    from engine.runs.profile_diagnosis import diagnose_profile

    diagnosis = diagnose_profile(profile)
    ranks = shown_ranks(profile)
    focus = next((rank for rank in ranks if rank.rank == diagnosis.straggler), ranks[0])
    lines = [*_header(profile, width), *wrap_text(Text(diagnosis.message, STRONG), width), Text()]
    lines += [_bar_line(rank, ranks, width) for rank in ranks]
    if len(ranks) < len(profile.ranks):
        more = len(profile.ranks) - len(ranks)
        lines.append(Text(f"{pluralize(more, 'rank')} with less work of their own not shown", MUTED))
    lines += [*_legend(width), Text(), *_part_table(ranks, width)]
    if any(rank.source == "events" for rank in ranks):
        lines += wrap_text(Text(WITHOUT_KERNELS, WARNING), width)
    return [*lines, Text(), *_operator_lines(focus, width), Text(), *_input_lines(ranks, width)]


def shown_ranks(profile: Profile) -> list[RankProfile]:
    """Return the ranks to show, in their order."""
    chosen = sorted(profile.ranks, key=lambda rank: -rank.own_seconds)[:MAX_SHOWN_RANKS]
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


def _legend(width: int) -> list[Text]:
    """Return the character of each part, in as many lines as it takes."""
    from engine.runs.profile_diagnosis import PART_NAMES

    lines = [Text(no_wrap=True, end="")]
    for part, (sign, style) in PART_SIGNS.items():
        entry = Text.assemble((sign, style), f" {PART_NAMES[part]}")
        if lines[-1].plain and lines[-1].cell_len + 2 + entry.cell_len > width:
            lines.append(Text(no_wrap=True, end=""))
        lines[-1].append("  " if lines[-1].plain else "").append_text(entry)
    return lines


def _part_table(ranks: Sequence[RankProfile], width: int) -> list[Text]:
    """Return the mean of each part in milliseconds, and the step without the profiler."""
    from engine.runs.profile_diagnosis import PART_NAMES

    columns: list[Column[RankProfile]] = [
        Column("ms", "ms", lambda rank: f"rank {rank.rank}", priority=len(NARROW_WITHOUT)),
        *(_figure(part, PART_NAMES[part], _part_cell(part)) for part in PART_SIGNS),
        _figure("step", "step", lambda rank: _ms(rank.step_seconds)),
        _figure("unprofiled", "unprofiled", lambda rank: UNKNOWN if rank.unprofiled is None else _ms(rank.unprofiled)),
    ]
    return _table(columns, ranks, width)


def _figure(key: str, title: str, cell: Callable[[RankProfile], str]) -> Column[RankProfile]:
    """Return a column of numbers."""
    priority = NARROW_WITHOUT.index(key) if key in NARROW_WITHOUT else len(NARROW_WITHOUT)
    return Column(key, title, cell, Align.RIGHT, priority=priority)


def _part_cell(part: Part) -> Callable[[RankProfile], str]:
    return lambda rank: _ms(rank.parts[part].mean) if part in rank.parts else UNKNOWN


def _ms(seconds: float, digits: int = 1) -> str:
    return f"{seconds * 1e3:,.{digits}f}"


def _table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> list[Text]:
    """Return a muted header and a line per row."""
    table = fit(columns, rows, width, gap=" ")
    return [styled(table.header(MUTED)), *(styled(table.line(row)) for row in rows)]


def _operator_lines(rank: RankProfile, width: int) -> list[Text]:
    """Return the operators of a rank that take the most time."""
    if not rank.operators:
        return [Text(f"No operators of rank {rank.rank} in the trace", MUTED)]
    title = f"operators of rank {rank.rank}"
    kind = f" ({'GPU kernels' if rank.source == 'kernels' else 'own CPU time'})" if width >= MIN_KIND_COLUMNS else ""
    steps = len(rank.steps)
    columns: list[Column[Operator]] = [
        Column("name", title + kind, lambda operator: operator.name, max_width=MAX_NAME_COLUMNS, flex=True,
               shorten=Shorten.MIDDLE, width=MIN_NAME_COLUMNS),
        Column("calls", "calls", lambda operator: format_count(operator.calls), Align.RIGHT),
        Column("ms/step", "ms/step", lambda operator: _ms(operator.seconds / steps, 2), Align.RIGHT),
        Column("share", "share", lambda operator: format_share(operator.share), Align.RIGHT),
    ]  # fmt: skip
    return _table(columns, rank.operators, width)


def _input_lines(ranks: Sequence[RankProfile], width: int) -> list[Text]:
    """Return the time of the input per stage, and how many batches were ready."""
    timed = [(rank.rank, rank.input) for rank in ranks if rank.input is not None]
    if not timed:
        return [Text(WITHOUT_STAGES, MUTED)]

    def stage_cell(stage: str) -> Callable[[tuple[int, InputTimes]], str]:
        return lambda row: _ms(row[1].seconds.get(stage, 0.0) / max(row[1].images, 1), 2)

    columns: list[Column[tuple[int, InputTimes]]] = [
        Column("ms/image", "ms/image", lambda row: f"rank {row[0]}", priority=1),
        *(
            Column(stage, stage, stage_cell(stage), Align.RIGHT)
            for stage in dict.fromkeys(stage for _, times in timed for stage in times.seconds)
        ),
        Column("ready", "ready", lambda row: f"{row[1].queue_depth:.1f}", Align.RIGHT, priority=1),
    ]
    return [*wrap_text(Text(INPUT_TITLE, MUTED), width), *_table(columns, timed, width)]


def trace_lines(profile: Profile, folder: str) -> list[Text]:
    """Return where the traces are, and why a rank has none."""
    traces = [rank for rank in profile.ranks if rank.trace]
    lines = []
    if traces:
        names = printable(f"{folder}/{traces[0].trace}")
        more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
        lines.append(Text(f"Open in https://ui.perfetto.dev: {names}{more}", ACCENT))
    problems = [rank for rank in profile.ranks if rank.problem]
    if problems:
        lines.append(Text(f"rank {problems[0].rank} has no trace: {printable(problems[0].problem)}", WARNING))
    return lines

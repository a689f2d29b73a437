"""The keys of a screen and the meanings of its readings, for its help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from engine.show.readings import GpuReading
from engine.show.table import GAP, NO_LIMIT, Column, fit
from tui.keymap import Key
from tui.palette import ACCENT, MUTED, STRONG
from tui.tables import styled, wrap_text

MIN_HELP_COLUMNS = 20
READING_COLUMNS: tuple[Column[GpuReading], ...] = (
    Column("label", "", lambda reading: reading.label),
    Column("unit", "", lambda reading: reading.unit),
    Column("meaning", "", lambda reading: reading.meaning),
)


def help_lines(groups: Mapping[str, Sequence[Key]], is_available: Callable[[str], bool], width: int) -> list[Text]:
    """Return a heading per group, and per key its names, title and help, wrapped to `width` columns."""
    columns: list[Column[Key]] = [
        Column("keys", "", lambda row: row.key_labels, style=lambda row: ACCENT if is_available(row.action) else MUTED),
        Column("title", "", lambda row: row.title, style=lambda row: "" if is_available(row.action) else MUTED),
        Column("help", "", lambda row: row.help),
    ]
    table = fit(columns, [key for group in groups.values() for key in group], NO_LIMIT)
    indent = sum(table.widths[:2]) + 2 * len(GAP)
    lines: list[Text] = []
    for title, group in groups.items():
        lines += [Text(""), Text(title, STRONG)] if lines else [Text(title, STRONG)]
        for key in group:
            first, *others = wrap_text(Text(key.help), max(width - indent, MIN_HELP_COLUMNS))
            lines.append(styled(table.line(key, rest=("help", ((first.plain, MUTED),)))))
            lines += [Text(" " * indent + other.plain, MUTED) for other in others]
    return lines


def meaning_lines(readings: Sequence[GpuReading], width: int) -> list[Text]:
    """Return a heading, and the label, the unit and the meaning of each reading, wrapped to `width` columns."""
    table = fit(READING_COLUMNS, readings, NO_LIMIT)
    indent = sum(table.widths[:2]) + 2 * len(GAP)
    lines = [Text("Readings", STRONG)]
    for reading in readings:
        first, *others = wrap_text(Text(reading.meaning), max(width - indent, MIN_HELP_COLUMNS))
        lines.append(styled(table.line(reading, rest=("meaning", ((first.plain, MUTED),)))))
        lines += [Text(" " * indent + other.plain, MUTED) for other in others]
    return lines

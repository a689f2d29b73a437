"""The checks of `gputrain doctor`, one area at a time. `tui.cli.machine` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap

from rich.text import Text

from engine.base.text import pluralize, printable
from engine.jobs.doctor.check import Check, CheckState
from engine.report.table import GAP, NO_LIMIT, Column, fit
from tui.screens.tables import styled
from tui.terminal.palette import BAD, GOOD, MUTED, STRONG, WARNING

STATE_STYLES: dict[CheckState, str] = {"ok": GOOD, "warning": WARNING, "problem": BAD, "unknown": MUTED}
COLUMNS: tuple[Column[Check], ...] = (
    Column("state", "state", lambda check: check.state, width=7, style=lambda check: STATE_STYLES[check.state]),
    Column("name", "check", lambda check: check.name, width=13),
    Column("found", "found", lambda check: check.found),
)
MIN_TEXT_COLUMNS = 30


def area_lines(checks: Sequence[Check], width: int) -> Iterator[Text]:
    """Yield the name of an area and its checks, whose texts are wrapped to `width` columns."""
    yield Text(checks[0].area, STRONG)
    merged = merge_gpus(checks)
    table = fit(COLUMNS, merged, NO_LIMIT)
    indent = sum(table.widths[:2]) + 2 * len(GAP)
    for check in merged:
        found, *others = wrap(printable(check.found), max(width - indent, MIN_TEXT_COLUMNS))
        yield styled(table.line(check, rest=("found", found)))
        for line in others:
            yield Text(" " * indent + line)
        advice = wrap(printable(check.advice), max(width - indent - 2, MIN_TEXT_COLUMNS), break_on_hyphens=False)
        for index, line in enumerate(advice):
            yield Text(" " * indent + ("  " if index else "→ ") + line, MUTED)
    yield Text("")


def merge_gpus(checks: Sequence[Check]) -> list[Check]:
    """Merge equal checks of several GPUs into one: `GPU 0,1,3`."""
    indices: dict[Check, list[int]] = {}
    for check in checks:
        key = check if check.gpu is None else replace(check, name="GPU", gpu=None)
        indices.setdefault(key, []).extend([] if check.gpu is None else [check.gpu])
    return [
        replace(check, name=f"{check.name} {','.join(map(str, gpus))}" if gpus else check.name)
        for check, gpus in indices.items()
    ]


def summary_line(checks: Sequence[Check]) -> str:
    """Return the number of problems and warnings as a sentence."""
    problems = sum(check.state == "problem" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    words = [pluralize(problems, "problem")] if problems else ["No problem"]
    return ", ".join([*words, *([pluralize(warnings, "warning")] if warnings else [])]) + "."

"""Output of `gputrain doctor`: checks as text, one area at a time, or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from textwrap import wrap

import typer
from rich.text import Text

from engine.doctor.check import Check, CheckState
from engine.utils.text import pluralize, printable
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING
from tui.text.tables import table_console

DOCTOR_FORMAT = 1
STATE_STYLES: dict[CheckState, str] = {"ok": GOOD, "warning": WARNING, "problem": BAD, "unknown": MUTED}
STATE_COLUMNS = len("warning")
NAME_COLUMNS = len("shared memory")
GAP = "  "
TEXT_INDENT = STATE_COLUMNS + NAME_COLUMNS + 2 * len(GAP)
MIN_TEXT_COLUMNS = 30


def show_checks(areas: Iterable[Sequence[Check]], *, as_json: bool) -> int:
    """Print all checks and return the exit code: 0 without problems, 2 if `gputrain run` refuses the config, else 1."""
    done: list[Check] = []
    if as_json:
        done = [check for area in areas for check in area]
        typer.echo(json.dumps({"format": DOCTOR_FORMAT, "checks": [check.to_dict() for check in done]}, indent=2))
    else:
        plain = not sys.stdout.isatty()
        console = table_console()
        with nullcontext() if plain else console.status("checking"):
            for area in areas:
                done += area
                for line in area_lines(area, console.width):
                    console.print(line, soft_wrap=True)
        typer.echo(summary_line(done), err=True)
    if any(check.refuses_run for check in done):
        return 2
    return int(any(check.state == "problem" for check in done))


def area_lines(checks: Sequence[Check], width: int) -> Iterator[Text]:
    """Yield the name of an area and its checks."""
    yield Text(checks[0].area, STRONG)
    for check in merge_gpus(checks):
        lines = wrap(printable(check.found), max(width - TEXT_INDENT, MIN_TEXT_COLUMNS))
        first = Text()
        first.append(check.state.ljust(STATE_COLUMNS), STATE_STYLES[check.state])
        first.append(GAP + check.name.ljust(NAME_COLUMNS) + GAP + lines[0])
        yield first
        for line in lines[1:]:
            yield Text(" " * TEXT_INDENT + line)
        advice = wrap(printable(check.advice), max(width - TEXT_INDENT - 2, MIN_TEXT_COLUMNS), break_on_hyphens=False)
        for index, line in enumerate(advice):
            yield Text(" " * TEXT_INDENT + ("  " if index else "→ ") + line, MUTED)
    yield Text("")


def merge_gpus(checks: Sequence[Check]) -> list[Check]:
    """Merge equal checks of several GPUs into one."""
    indices: dict[Check, list[int]] = {}
    for check in checks:
        if check.gpu is None:
            indices.setdefault(check, [])
        else:
            indices.setdefault(replace(check, name="GPU", gpu=None), []).append(check.gpu)
    return [replace(check, name=_name_with_indices(check.name, gpus)) for check, gpus in indices.items()]


def _name_with_indices(name: str, indices: Sequence[int]) -> str:
    """Return the name with index ranges: `GPU 0-3,7`."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1].append(index)
        else:
            ranges.append([index])
    parts = [str(pair[0]) if len(pair) == 1 else f"{pair[0]}-{pair[-1]}" for pair in ranges]
    return f"{name} {','.join(parts)}" if parts else name


def summary_line(checks: Sequence[Check]) -> str:
    """Return the number of problems and warnings as a sentence."""
    problems = sum(check.state == "problem" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    words = [pluralize(problems, "problem")] if problems else ["No problem"]
    return ", ".join([*words, *([pluralize(warnings, "warning")] if warnings else [])]) + "."

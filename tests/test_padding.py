"""Text is padded where tables are fitted and charts are drawn, so that no other place measures columns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.records import ROOT

PADDED = ("engine/show", "tui/tables", "tui/charts", "tui/widgets")
EXCEPTIONS = {
    "engine/runs/event_lines.py": "lines of a log are written one by one; the width of later ones is unknown",
    "tui/cli/help.py": "the names of commands that are guessed, in one column",
    "tui/cli/help_page.py": "click aligns each section of commands on its own",
    "engine/distributed/collectives.py": "pads bytes: all ranks gather equally long buffers",
    "engine/utils/files.py": "pads bytes: overwrites a file with blanks of the same length",
}
METHODS = ("ljust", "rjust", "center", "zfill", "set_cell_size", "expandtabs")
# Format specification with a width; leading zeros belong to numbers such as those of steps in file names.
WIDTH = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?[1-9]\d*[_,]?(?:\.\d+)?[a-zA-Z%]?")
"""Fill and alignment, sign, width, grouping, precision and type, as in Python's format specification."""


def padding_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the numbers of the lines that pad text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in METHODS:
                yield node.lineno
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            assert isinstance(node.format_spec, ast.JoinedStr)
            parts = node.format_spec.values
            if WIDTH.fullmatch("".join(str(part.value) if isinstance(part, ast.Constant) else "9" for part in parts)):
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "pads"),
    [
        ("f'{x:<8}'", True),
        ("f'{x:>{width}}'", True),
        ("f'{x:8,.1f}'", True),
        ("f'{x:{width}}'", True),
        ("x.ljust(8)", True),
        ("set_cell_size(x, 8)", True),
        ("f'{x:,.1f}'", False),
        ("f'{x:.{digits}g}'", False),
        ("f'{step:08d}'", False),
        ("f'{number:0{width}d}'", False),
        ("f'{time:%H:%M}'", False),
    ],
)
def test_padding_lines_finds_methods_and_widths(code: str, pads: bool) -> None:
    assert bool([*padding_lines(ast.parse(code))]) is pads


def test_text_is_padded_only_where_tables_and_charts_are_drawn() -> None:
    found: dict[str, list[int]] = {}
    for path in sorted((*Path(ROOT, "engine").rglob("*.py"), *Path(ROOT, "tui").rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        lines = [] if name.startswith(PADDED) else [*padding_lines(ast.parse(path.read_bytes()))]
        if lines:
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(found)
    assert len(EXCEPTIONS) <= 5

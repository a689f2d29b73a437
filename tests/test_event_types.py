"""The type checker refuses an event field that excludes what the journal may hold: an unknown value, or none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVENTS, SCORES = "engine/runs/events.py", "engine/runs/records.py"
_OPTIONAL = re.compile(r" \| (?:UnsetType|None)\b")


@pytest.mark.nightly
# `EpochEvent` takes its values from `Scores`, which would be as wrong as its own fields if both changed.
@pytest.mark.parametrize("changes_scores", [True, False])
def test_type_checker_refuses_event_fields_that_are_never_absent(changes_scores: bool, tmp_path: Path) -> None:
    module = SCORES if changes_scores else EVENTS
    changed, fields = without_optional_fields((ROOT / module).read_text().splitlines(), changes_scores)
    (tmp_path / "changed.py").write_text("\n".join(changed))
    arguments = ["--cache-dir", str(tmp_path / "cache"), "--shadow-file", module, str(tmp_path / "changed.py")]
    checked = subprocess.run([sys.executable, "-m", "mypy", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert len(fields) >= (4 if changes_scores else 15)
    refused = re.findall(rf'{module}:(\d+): error|error: Argument "(\w+)" to "(\w+)"', checked.stdout)
    places = {line or (kind, name) for line, name, kind in refused}
    assert [field for field, line in fields.items() if not places & {field, str(line)}] == []


def without_optional_fields(lines: list[str], in_scores: bool) -> tuple[list[str], dict[tuple[str, str], int]]:
    """Return the lines with fields that are never None or unset, in `Scores` or in the events, and their places."""
    kind, changed, fields = "", list[str](), dict[tuple[str, str], int]()
    for number, line in enumerate(lines, 1):
        if found := re.match(r"class (\w+)", line):
            kind = found[1]
        field = re.match(r"    (\w+): ", line)
        if field and kind and (kind == "Scores") is in_scores and _OPTIONAL.search(line):
            fields[kind, field[1]] = number
            line = _OPTIONAL.sub("", line)
        changed.append(line)
    return changed, fields

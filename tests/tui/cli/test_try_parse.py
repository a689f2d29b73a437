"""`gputrain run --try-parse FILE` shows what would be found in the output of a command, and runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tui.cli.main import app

PATTERN = r"it(?P<step>\d+): cost (?P<cost>[\d.]+)"


def try_parse(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["run", "--try-parse", str(path), *words], prog_name="gputrain")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text("loading\nstep 10 loss 0.5\nit1: cost 7\nit2: cost 6\n")
    return path


def test_table_has_a_row_for_each_metric(path: Path) -> None:
    result = try_parse(path, "--parse", PATTERN)
    assert (result.exit_code, result.stderr) == (0, "3 of 4 lines have metrics\n")
    heading, *rows = (line.split() for line in result.stdout.splitlines())
    assert heading == ["metric", "values", "first", "step", "last", "step", "last"]
    assert rows == [["loss", "1", "10", "10", "0.5"], ["cost", "2", "1", "2", "6"]]

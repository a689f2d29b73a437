"""Which files a report or a figure may replace."""

from __future__ import annotations

from pathlib import Path

from engine.report.plot import MARK, write_output
from support.messages import raises_problem


def test_output_replaces_earlier_reports_only(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_output(path, MARK.encode(), force=False)
    write_output(path, b"own notes on gputrain report", force=False)
    with raises_problem("name-in-use", "--output", str(path), "--force"):
        write_output(path, b"", force=False)
    write_output(path, b"forced", force=True)
    assert path.read_bytes() == b"forced"


def test_output_names_path_that_cannot_be_written(tmp_path: Path) -> None:
    with raises_problem("not-a-file", "--output", tmp_path / "report.html"):
        write_output(tmp_path, b"", force=True)
    with raises_problem("not-writable", None, "File name too long"):
        write_output(tmp_path / f"{'a' * 300}.html", b"", force=False)

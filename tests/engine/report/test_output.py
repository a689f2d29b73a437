"""Which files a report or a figure may replace."""

from __future__ import annotations

from pathlib import Path

from engine.report.output import make_mark, write_output
from support.messages import raises_problem


def test_output_replaces_files_of_the_same_runs_only(tmp_path: Path) -> None:
    path, mark = tmp_path / "report.html", make_mark("report", ["a"])
    write_output(path, mark.encode(), mark, force=False)
    write_output(path, mark.encode() + b"2", mark, force=False)
    with raises_problem("name-in-use", "--output", str(path), "--force"):
        write_output(path, b"", make_mark("report", ["b"]), force=False)
    assert path.read_bytes().endswith(b"2")
    write_output(path, b"forced", make_mark("report", ["b"]), force=True)
    assert path.read_bytes() == b"forced"


def test_output_refuses_folder_and_missing_folder(tmp_path: Path) -> None:
    with raises_problem("not-a-file", "--output", tmp_path / "report.html"):
        write_output(tmp_path, b"", "", force=True)
    with raises_problem("not-found", "--output", str(tmp_path / "missing")):
        write_output(tmp_path / "missing" / "a.html", b"", "", force=True)
    with raises_problem("not-writable", None, "File name too long"):
        write_output(tmp_path / f"{'a' * 300}.html", b"", "", force=False)

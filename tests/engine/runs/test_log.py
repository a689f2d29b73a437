"""The log of a run as text for a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runs.log import MAX_PART_BYTES, LogReader


def test_log_reader_escapes_control_characters_except_tabs(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"loss\t0.5\x1b[2J\x9b\xc2\x9b\n 50%\r100%\r\nend")
    text = "".join(LogReader(tmp_path / "log.txt").read())
    assert text == "loss\t0.5\\x1b[2J\ufffd\\x9b\n 50%\n100%\nend"


def test_log_reader_refuses_link_and_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "log.txt")
    (tmp_path / "log.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            LogReader(tmp_path / name)


def test_log_reader_yields_long_line_in_parts(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("x" * 3 * MAX_PART_BYTES + "\n")
    parts = list(LogReader(tmp_path / "log.txt").read())
    assert max(map(len, parts)) == MAX_PART_BYTES
    assert "".join(parts) == "x" * 3 * MAX_PART_BYTES + "\n"


def test_log_reader_follows_growth_truncation_and_replacement(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first\nsec")
    reader = LogReader(log)
    assert "".join(reader.read()) == "first\nsec"
    with log.open("a") as file:
        file.write("ond\n")
    assert list(reader.read()) == ["ond\n"]
    log.write_text("short\n")
    assert list(reader.read()) == ["short\n"]
    (tmp_path / "new").write_text("a replaced log\n")
    (tmp_path / "new").replace(log)
    assert list(reader.read()) == ["a replaced log\n"]
    log.unlink()
    os.mkfifo(log)
    assert list(reader.read()) == []

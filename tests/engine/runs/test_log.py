"""The log of a run as text for a terminal."""

from __future__ import annotations

import os
import tracemalloc
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


@pytest.mark.parametrize(
    ("text", "count", "last"),
    [
        ("1\n2\n3\n", 2, "2\n3\n"),
        ("1\n2\n3", 2, "2\n3"),
        ("1\n2\n3", 1, "3"),
        ("1\n2\n\n", 2, "2\n\n"),
        ("1\n2\n", 5, "1\n2\n"),
        ("", 1, ""),
        ("1\n10%\r20%\r30%\nend\n", 2, "30%\nend\n"),
        ("1\n10%\r20%\r30%", 2, "20%\n30%"),
        ("x" * 2 * MAX_PART_BYTES + "\r" + "y" * 2 * MAX_PART_BYTES + "\n", 1, "y" * 2 * MAX_PART_BYTES + "\n"),
        ("x\n" * MAX_PART_BYTES * 2, MAX_PART_BYTES + 1, "x\n" * (MAX_PART_BYTES + 1)),
    ],
)
def test_log_reader_skips_to_last_lines(tmp_path: Path, text: str, count: int, last: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    reader = LogReader(tmp_path / "log.txt")
    reader.skip_to_last(count)
    assert "".join(reader.read()) == last
    with (tmp_path / "log.txt").open("a") as file:
        file.write("more\n")
    assert "".join(reader.read()) == "more\n"


def test_log_reader_skips_long_log_in_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w") as file:
        for _ in range(64):
            file.write("x" * (1 << 20))
        file.write("\nend")
    reader = LogReader(tmp_path / "log.txt")
    tracemalloc.start()
    reader.skip_to_last(2)
    assert sum(map(len, reader.read())) == (64 << 20) + 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20

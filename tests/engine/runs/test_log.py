"""The log of a run as text for a terminal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.runs.log import (
    MAX_PART_BYTES,
    MAX_PENDING_LENGTH,
    LogReader,
    LogWriter,
    PendingLines,
    log_files,
    open_log,
    read_pending,
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def test_log_reader_escapes_control_characters_except_tabs(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"loss\t0.5\x1b[2J\x9b\xc2\x9b\n 50%\r100%\r\nend")
    text = "".join(LogReader(tmp_path / "log.txt").read())
    assert text == "loss\t0.5\\x1b[2J\ufffd\\x9b\n 50%\n100%\nend"


def test_log_reader_follows_growth_truncation_and_replacement(log: Path, tmp_path: Path) -> None:
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


def test_log_reader_keeps_or_drops_colors(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("\x1b[1;31mred\tand\x1b[K\nplain\n")
    assert "".join(LogReader(tmp_path / "log.txt").read()) == "red\tand\\x1b[K\nplain\n"
    colored = "".join(LogReader(tmp_path / "log.txt", colors=True).read())
    assert colored == "\x1b[0;1;31mred\tand\\x1b[K\x1b[0m\nplain\n"


def write_lines(log: Path, count: int, max_bytes: int) -> None:
    writer = LogWriter(log, max_bytes)
    for number in range(count):
        writer.add(f"line {number:03}\n")
        writer.flush()
    writer.close()


def test_log_with_limit_keeps_beginning_and_end_and_says_what_is_lost(log: Path) -> None:
    write_lines(log, 200, 450)
    beginning, previous, _ = (path.read_text().splitlines() for path in log_files(log))
    assert beginning == [f"line {number:03}" for number in range(50)]
    lost, *last = log.read_text().splitlines()
    kept = [line for line in previous + last if line.startswith("line")]
    first = int(kept[0].removeprefix("line "))
    assert kept == [f"line {number:03}" for number in range(first, 200)]
    assert first > 50
    assert "not kept" in lost
    assert sum(path.stat().st_size for path in log_files(log)) < 4 * 450


def test_log_of_a_command_is_private_until_its_user_shares_it(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log.txt", 100)
    assert stat.S_IMODE((tmp_path / "log.txt").stat().st_mode) == 0o600
    (tmp_path / "log.txt").chmod(0o644)
    for _ in range(2):
        log.add("x" * 100)
        log.flush()
    PendingLines(tmp_path / "log.txt").write(["50%"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {
        "log.beginning.txt": 0o644, "log.previous.txt": 0o644, "log.txt": 0o644, "log.pending.txt": 0o600
    }  # fmt: skip


def test_log_reader_follows_log_with_limit_without_losing_a_line(log: Path) -> None:
    writer = LogWriter(log, 200)
    reader, text = LogReader(log), ""
    for number in range(400):
        writer.add(f"{number}\n")
        writer.flush()
        if number % 7 == 0:
            text += "".join(reader.read())
    text += "".join(reader.read())
    assert [line for line in text.splitlines() if line.isdigit()] == [str(number) for number in range(400)]


@pytest.mark.parametrize("count", [1, 20, 70, 100, 500, None])
def test_open_log_reads_all_files_of_a_log_with_limit(log: Path, count: int | None) -> None:
    write_lines(log, 200, 450)
    everything = [line for path in log_files(log) for line in path.read_text().splitlines()]
    text = "".join(part for reader in open_log(log, count=count) for part in reader.read())
    assert text.splitlines() == everything[-(count or 0) :]


def test_pending_lines_are_replaced_and_end_with_the_run(log: Path, tmp_path: Path) -> None:
    pending = PendingLines(log)
    pending.write(["\x1b[0;32m10%\x1b[0m"])
    assert read_pending(log) == ["\x1b[0;32m10%\x1b[0m"]
    pending.write(["20%", "x" * 2 * MAX_PENDING_LENGTH])
    assert read_pending(log) == ["20%", "x" * MAX_PENDING_LENGTH]
    pending.write(["30%"])
    assert read_pending(log) == ["30%"]
    pending.write([])
    assert read_pending(log) == []
    pending.close()
    assert (read_pending(log), list(tmp_path.iterdir())) == ([], [])


def test_pending_lines_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.txt"
    pending = PendingLines(log)
    pending.write(["10%"])
    log.parent.mkdir()
    pending.write(["10%"])
    assert read_pending(log) == ["10%"]

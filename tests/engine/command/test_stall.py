"""A command that shows no sign of life for too long: reported once, with its Python stacks if py-spy is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.command import stall
from engine.command.stall import StackDump, StallReporter, StallWatch
from engine.utils.errors import Problem
from engine.utils.process_table import ProcessId
from support.gputrain_command import wait_for


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stall_is_reported_once_until_the_next_sign_of_life() -> None:
    clock = Clock()
    watch = StallWatch(300.0, clock)
    found = []
    for now, sign in [(0, 1), (299, 1), (300, 1), (500, 1), (501, 2), (900, 2), (2100, 2)]:
        clock.now = now
        found.append(watch.poll(sign))
    # The longest silence was 501 s: three times as much is a stall.
    assert found == [None, None, 300, None, None, None, 1599]


def test_stall_detection_can_be_disabled() -> None:
    clock = Clock()
    watch = StallWatch(0.0, clock)
    clock.now = 1e6
    assert watch.poll() is None


@pytest.fixture
def sleeper() -> Iterator[ProcessId]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        found = ProcessId.find(process.pid)
        assert found is not None
        yield found
        process.kill()


def dump(process: ProcessId, folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> StackDump:
    """Return the dump of a process with a py-spy that runs `program`."""
    (folder / "py-spy").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    found = StackDump(300.0, [process], folder / "stacks.txt")
    found.start()
    wait_for(lambda: found.message is not None, "the stacks")
    return found


def test_stacks_of_python_processes_are_written(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dump(sleeper, tmp_path, monkeypatch, 'echo "$@"')
    assert (tmp_path / "stacks.txt").read_text() == f"dump --pid {sleeper.pid}\n"
    assert "stacks.txt" in str(found.message)


def test_reason_why_there_are_no_stacks_is_in_the_message(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dump(sleeper, tmp_path, monkeypatch, "echo denied >&2; exit 1").message == "py-spy: denied"


def test_error_while_stacks_are_written_leaves_the_warning(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stacks.txt").mkdir()
    assert dump(sleeper, tmp_path, monkeypatch, 'echo "$@"').message == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unexpected_error_leaves_the_warning(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "MAX_DUMP_BYTES", "none")
    assert dump(sleeper, tmp_path, monkeypatch, 'echo "$@"').message == ""


def test_without_py_spy_there_is_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = StackDump(300.0, [], tmp_path / "stacks.txt")
    found.start()
    assert found.message == ""


def test_stall_is_reported_without_stacks_if_the_command_ends_before_they_are_read(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked\nuntil [ -e {tmp_path}/ended ]; do sleep 0.05; done\n"
    )
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found: list[Problem] = []
    reporter = StallReporter(1e-9, lambda: [sleeper], tmp_path / "stacks.txt", found.append)

    def has_asked() -> bool:
        reporter.poll("no change")
        return (tmp_path / "asked").exists()

    wait_for(has_asked, "the stall")
    assert found == []
    reporter.close()
    reporter.close()
    (tmp_path / "ended").touch()
    assert [problem.code for problem in found] == ["stalled"]


def test_second_stall_does_not_replace_the_warning_of_the_first_one(
    sleeper: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/ended ]; do sleep 0.05; done\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found: list[Problem] = []
    reporter = StallReporter(1e-9, lambda: [sleeper], tmp_path / "stacks.txt", found.append)
    clock = Clock()
    reporter._watch = StallWatch(1.0, clock)
    for now, sign in [(0, 1), (2, 1), (2, 2), (20, 2)]:
        clock.now = now
        reporter.poll(sign)
    assert [problem.code for problem in found] == ["stalled"]
    reporter.close()
    (tmp_path / "ended").touch()
    assert [problem.code for problem in found] == ["stalled", "stalled"]

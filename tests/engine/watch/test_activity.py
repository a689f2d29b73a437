"""What a run of another program does: growing, quiet, ended, by real files and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.watch.activity import GROWING_SECONDS, Activity, activity_text, judge
from engine.watch.process import ProcessId
from engine.watch.writers import Writers

NOW = 1_800_000_000.0
WRITE = "import sys; file = open(sys.argv[1], 'a'); file.write('x'); file.flush(); print(flush=True); sys.stdin.read()"


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has `tmp_path`/log open until its stdin is closed."""
    command = [sys.executable, "-S", "-c", WRITE, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@pytest.mark.parametrize(
    ("written_at", "now", "ends", "activity"),
    [
        (NOW, NOW + 1, {}, Activity.GROWING),
        (NOW, NOW + GROWING_SECONDS - 1, {}, Activity.GROWING),
        (NOW, NOW + GROWING_SECONDS, {}, Activity.QUIET),
        (NOW, NOW + 1, {"has_ended": True}, Activity.ENDED),
        (NOW, NOW + 2, {"writer_ended_at": NOW + 1}, Activity.ENDED),
        (NOW + 5, NOW + 6, {"writer_ended_at": NOW + 1}, Activity.GROWING),
    ],
)
def test_run_grows_until_it_is_quiet_for_long_or_its_log_or_writer_ends(
    written_at: float, now: float, ends: dict[str, Any], activity: Activity
) -> None:
    assert judge(written_at, now, **ends) is activity


def test_quiet_run_tells_for_how_long() -> None:
    assert activity_text(Activity.QUIET, time.time() - 725) == "quiet for 12 min"
    assert activity_text(Activity.GROWING, time.time()) == "growing"


def test_writer_of_a_file_is_the_first_process_that_has_it_open(tmp_path: Path) -> None:
    log, writers = tmp_path / "log", Writers()
    assert writers.writer_of([log]) is None
    # A worker of a data loader has the files of the process that started it.
    with log.open("a") as file, subprocess.Popen(["sleep", "60"], stdout=file) as worker:
        assert writers.writer_of([log]) == ProcessId.find(os.getpid())
        worker.kill()
    assert writers.writer_of([log]) == ProcessId.find(os.getpid()), "it opens the file again"
    assert Writers().writer_of([log]) is None


def test_process_that_has_ended_writes_no_file(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    log, writers = tmp_path / "log", Writers()
    assert writers.writer_of([log]) == ProcessId.find(writer.pid)
    writer.communicate()
    assert writers.writer_of([log]) is None

"""What a run of another program does: growing, quiet, ended, by real files and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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


def test_run_is_growing_until_nothing_was_written_for_long() -> None:
    assert judge(NOW, NOW + 1) is Activity.GROWING
    assert judge(NOW, NOW + GROWING_SECONDS - 1) is Activity.GROWING
    assert judge(NOW, NOW + GROWING_SECONDS) is Activity.QUIET


def test_run_has_ended_if_its_log_says_so_or_its_writer_is_gone() -> None:
    assert judge(NOW, NOW + 1, has_ended=True) is Activity.ENDED
    assert judge(NOW, NOW + 2, writer_ended_at=NOW + 1) is Activity.ENDED


def test_run_that_is_written_after_the_end_of_its_writer_grows_again() -> None:
    assert judge(NOW + 5, NOW + 6, writer_ended_at=NOW + 1) is Activity.GROWING


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

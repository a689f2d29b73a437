"""The supervisor of a run: signals, stop requests, killed processes and failures. It leaves no process behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.gputrain_command import (
    Gputrain,
    children_that_are_ranks,
    find_rank_pids,
    find_rank_starter,
    read_events,
    wait_for,
)

LONG = ["run", "--headless", "--model", "linear", "--ranks", "2", "--epochs", "100000", "--name", "long"]


SPAWN_AT_NIGHT = pytest.param("spawn", marks=pytest.mark.nightly)
with_fork_and_nightly_spawn = pytest.mark.parametrize("long_run", ["fork", SPAWN_AT_NIGHT], indirect=True)


@pytest.fixture
def long_run(gputrain: Gputrain, request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """A run in its third epoch that does not end by itself; its parameter is `device.start_method`."""
    process = gputrain.start(*LONG, f"device.start_method={getattr(request, 'param', 'auto')}")
    gputrain.wait_for_event("long", "epoch", 2)
    return process


def terminate_all(gputrain: Gputrain) -> None:
    for process in gputrain.processes():
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def state(gputrain: Gputrain) -> str:
    rows: list[dict[str, Any]] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    return str(rows[0]["state"])


@pytest.mark.nightly
def test_sigint_stops_run_at_next_step_with_checkpoint(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    long_run.send_signal(signal.SIGINT)
    _, messages = long_run.communicate(timeout=60)
    assert long_run.returncode == 3
    assert "stop requested by SIGINT" in messages
    assert "resume with `gputrain resume long`" in messages.splitlines()[-1]
    assert state(gputrain) == "stopped"


@pytest.mark.nightly
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_sigterm_during_startup_stops_before_second_step(gputrain: Gputrain, start_method: str) -> None:
    process = gputrain.start(*LONG, f"device.start_method={start_method}")
    wait_for(lambda: len(find_rank_pids(process, gputrain)) == 2, "two ranks")
    terminate_all(gputrain)
    assert process.wait(60) == 3
    assert max(event.get("step", 0) for event in read_events(gputrain.runs / "long")) <= 1


@with_fork_and_nightly_spawn
@pytest.mark.nightly
def test_second_sigint_kills_run(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    rank = find_rank_pids(long_run, gputrain)[0]
    os.kill(rank, signal.SIGSTOP)
    long_run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert long_run.poll() is None, "one rank is stopped, so the first signal cannot end the run"
    long_run.send_signal(signal.SIGINT)
    _, messages = long_run.communicate(timeout=60)
    assert "killed by a second SIGINT" in messages
    assert long_run.returncode == 3


@pytest.mark.parametrize("start_method", ["fork", SPAWN_AT_NIGHT])
def test_killed_supervisor_ends_ranks_and_dataloader_workers(gputrain: Gputrain, start_method: str) -> None:
    options = ["data.pipeline=stream", "--workers", "1", f"device.start_method={start_method}"]
    process = gputrain.start(*LONG, *options)
    gputrain.wait_for_event("long", "epoch")
    assert len(gputrain.processes()) >= 5, "a supervisor, two ranks and two DataLoader workers"
    process.kill()
    start = time.monotonic()
    wait_for(lambda: not gputrain.processes(), "the end of the ranks and DataLoader workers", 9)
    print(f"all gone after {time.monotonic() - start:.2f} s")
    assert state(gputrain) == "crashed"


def open_files(pid: int) -> set[str]:
    files = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # A training rank opens and closes files all the time.
            files.add(str(descriptor.readlink()))
    return files


@pytest.mark.nightly
@pytest.mark.parametrize("long_run", ["fork", "spawn"], indirect=True)
def test_store_of_one_host_is_an_anonymous_file_without_port_until_all_get_sigterm(
    gputrain: Gputrain, long_run: subprocess.Popen[str]
) -> None:
    starter = find_rank_starter(long_run, gputrain)
    assert starter is not None
    assert [process.net_connections("tcp") for process in (psutil.Process(long_run.pid), starter)] == [[], []]
    for rank in children_that_are_ranks(starter):
        assert "/memfd:gputrain-store (deleted)" in open_files(rank.pid)
    terminate_all(gputrain)
    assert long_run.wait(60) == 3
    assert list((gputrain.folder / "tmp").iterdir()) == []


def test_supervisor_reports_torch_import_error_in_one_line(gputrain: Gputrain) -> None:
    broken = gputrain.folder / "broken" / "torch.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = gputrain(*LONG, PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    assert "failed: ImportError: libcudart.so.13: cannot open shared object file" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_run_survives_terminal_hangup_and_is_not_blocked_by_reader_of_stdout(gputrain: Gputrain) -> None:
    controller, terminal = pty.openpty()
    options = ["--epochs", "30", "--name", "long", "--json", "run.log_every=1"]
    process = gputrain.start(
        *("run", "--headless", "--model", "linear", *options),
        stdin=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    gputrain.wait_for_event("long", "run_started")
    # Closing the controller hangs up the terminal: the run receives SIGHUP, and its writes to the terminal fail.
    os.close(controller)
    gputrain.wait_for_event("long", "run_finished")
    assert (gputrain.runs / "long" / "events.jsonl").stat().st_size > 70_000, "more than a pipe holds"
    assert process.wait(120) == 0
    assert state(gputrain) == "finished"


@pytest.mark.nightly
def test_unreadable_image_stops_run_and_is_named(gputrain: Gputrain) -> None:
    from PIL import Image

    for label in ("a", "b"):
        for number in range(8):
            path = gputrain.folder / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), number).save(path)
    options = ["--dataset", "folder", "--data-path", "images", "--batch-size", "2", "--workers", "1"]
    process = gputrain.start(*LONG, *options, "data.image_size=8", "data.prefetch=1", "data.pipeline=stream")
    gputrain.wait_for_event("long", "epoch", 1)
    (gputrain.folder / "images" / "a" / "3.png").write_text("")
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"the image {gputrain.folder / 'images' / 'a' / '3.png'} cannot be read" in messages.splitlines()[-1]

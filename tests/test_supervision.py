"""A run from the outside: asked to stop, hurt, left alone. It ends in a known way and leaves nothing behind."""

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
from typing import Any

import psutil
import pytest
from conftest import Gputrain, events_of, ranks_of, spawner_of, wait_for

LONG = ["run", "--headless", "--model", "linear", "--ranks", "2", "--epochs", "100000", "--name", "long"]


@pytest.fixture
def long_run(gputrain: Gputrain) -> subprocess.Popen[str]:
    """A run in its third epoch that would not end by itself."""
    process = gputrain.start(*LONG)
    gputrain.wait_for_event("long", "epoch", 2)
    return process


def terminate_all(gputrain: Gputrain) -> None:
    for process in gputrain.processes():
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def epochs_of(gputrain: Gputrain) -> list[int]:
    return [event["epoch"] for event in events_of(gputrain.runs / "long") if event["type"] == "epoch"]


def state(gputrain: Gputrain) -> str:
    rows: list[dict[str, Any]] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    return str(rows[0]["state"])


def test_sigint_stops_at_the_next_step_with_a_checkpoint(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    long_run.send_signal(signal.SIGINT)
    _, messages = long_run.communicate(timeout=60)
    assert long_run.returncode == 3
    assert "stop requested by SIGINT" in messages
    assert "continue with `gputrain resume long`" in messages.splitlines()[-1]
    assert state(gputrain) == "stopped"


def test_a_signal_to_all_processes_at_once_stops_as_well(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    terminate_all(gputrain)
    assert long_run.wait(60) == 3


def test_a_signal_during_the_start_stops_before_the_first_step(gputrain: Gputrain) -> None:
    process = gputrain.start(*LONG)
    wait_for(lambda: len(ranks_of(process, gputrain)) == 2, "two ranks")
    terminate_all(gputrain)
    assert process.wait(60) == 3
    assert max(event.get("step", 0) for event in events_of(gputrain.runs / "long")) <= 1


def test_a_second_sigint_kills_at_once(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    rank = ranks_of(long_run, gputrain)[0]
    os.kill(rank, signal.SIGSTOP)
    long_run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert long_run.poll() is None, "one rank stands still, so the first signal cannot be answered"
    long_run.send_signal(signal.SIGINT)
    _, messages = long_run.communicate(timeout=60)
    assert "killed by a second SIGINT" in messages
    assert long_run.returncode == 3


def test_stop_waits_until_the_run_has_stopped_and_resume_goes_on(
    gputrain: Gputrain, long_run: subprocess.Popen[str]
) -> None:
    done = gputrain("stop", "long")
    assert (done.returncode, done.stderr) == (0, "long is stopped.\n")
    assert long_run.wait(60) == 3
    control = next(event for event in events_of(gputrain.runs / "long") if event["type"] == "control")
    assert (control["request"], control["outcome"]) == ("stop", "at the next step, with a checkpoint")
    assert list((gputrain.runs / "long" / "control").iterdir()) == []

    before = len(epochs_of(gputrain))
    resumed = gputrain("resume", "long", f"run.epochs={before + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert epochs_of(gputrain) == list(range(1, before + 3))


def test_a_killed_supervisor_takes_ranks_and_loader_processes_along(gputrain: Gputrain) -> None:
    process = gputrain.start(*LONG, "data.pipeline=stream", "--workers", "1")
    gputrain.wait_for_event("long", "epoch")
    assert len(gputrain.processes()) >= 5, "a supervisor, two ranks and two loader processes"
    process.kill()
    began = time.monotonic()
    wait_for(lambda: not gputrain.processes(), "the end of ranks and loader processes", 9)
    print(f"all gone after {time.monotonic() - began:.2f} s")
    assert state(gputrain) == "crashed"


def test_what_has_forked_the_ranks_takes_them_along_and_is_named(
    gputrain: Gputrain, long_run: subprocess.Popen[str]
) -> None:
    spawner = spawner_of(long_run, gputrain)
    assert spawner is not None
    ranks = spawner.children()
    spawner.kill()
    _, messages = long_run.communicate(timeout=60)
    assert long_run.returncode == 1
    assert "the process that forked the ranks is gone: it was killed by SIGKILL" in messages
    wait_for(lambda: not any(rank.is_running() for rank in ranks), "the end of the ranks")


def test_a_torch_that_cannot_be_imported_is_one_sentence(gputrain: Gputrain) -> None:
    broken = gputrain.folder / "broken" / "torch.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = gputrain(*LONG, PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    assert "failed: ImportError: libcudart.so.13: cannot open shared object file" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ranks_that_cannot_all_be_forked_are_one_sentence(gputrain: Gputrain) -> None:
    """As where a limit of processes is met: the second rank is not to be had."""
    faults = gputrain.folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(
        "import os\nfork, forks = os.fork, []\n"
        "def limited():\n"
        "    if forks: raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    forks.append(1)\n    return fork()\n"
        "os.fork = limited\n"
    )
    done = gputrain(*LONG, PYTHONPATH=str(faults))
    assert done.returncode == 1
    assert "failed: BlockingIOError: [Errno 11] Resource temporarily unavailable" in done.stderr.splitlines()[-1]


def test_a_run_outlives_its_terminal(gputrain: Gputrain) -> None:
    controller, terminal = pty.openpty()
    arguments = ["run", "--headless", "--model", "linear", "--epochs", "20", "--name", "long"]
    process = gputrain.start(
        *arguments,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    gputrain.wait_for_event("long", "run_started")
    # With its last holder gone the terminal hangs up: SIGHUP to the run, and every write to it fails.
    os.close(controller)
    assert process.wait(120) == 0
    assert state(gputrain) == "finished"


def test_a_reader_that_does_not_read_holds_nothing_up(gputrain: Gputrain) -> None:
    options = ["--epochs", "30", "--name", "long", "--json", "run.log_every=1"]
    process = gputrain.start("run", "--headless", "--model", "linear", *options)
    gputrain.wait_for_event("long", "run_finished")
    assert (gputrain.runs / "long" / "events.jsonl").stat().st_size > 70_000, "more than a pipe holds"
    assert process.wait(30) == 0


def test_an_image_that_becomes_unreadable_ends_the_run_by_name(gputrain: Gputrain) -> None:
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


def test_logs_follow_a_run_to_its_end(gputrain: Gputrain, long_run: subprocess.Popen[str]) -> None:
    follower = gputrain.start("logs", "long", "--follow")
    gputrain("stop", "long")
    text, _ = follower.communicate(timeout=60)
    assert text == (gputrain.runs / "long" / "log.txt").read_text()
    assert text.splitlines()[-1].endswith("stopped: continue with `gputrain resume long`")

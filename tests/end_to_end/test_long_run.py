"""A run of one week with one event per second.

Its latest state costs no more than reading both ends of the journal, the whole journal is read in pieces, and neither
writer nor readers keep memory per step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.runs.events import CheckpointSaved, Event, GpuEvent, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader, to_line
from engine.runs.records import GpuSample
from support.gputrain_command import Gputrain, wait_for
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_run_record
from tui.cli.main import app
from tui.screens.pollers.run import RunPoller

HOUR = 3600
DAY, WEEK = 24 * HOUR, 7 * 24 * HOUR
STEPS = 10
# Bytes allowed per epoch, which the history keeps, and measurement error.
PER_EPOCH, SLACK = 1500, 25_000
GPUS = [
    GpuSample(
        uuid=f"GPU-{number}", host="h", state="ok", util=97.0, sm_active=81.5, tensor_active=40.2,
        memory_used=61 << 30, temperature=64.0, power=512.5, sm_clock=1980.0, throttle=["power"],
    )
    for number in range(4)
]  # fmt: skip


def event_at(second: int) -> Event:
    """Return the event of one second: steps, GPU readings every 5 s, an epoch and its checkpoint every 10 min."""
    clock = 1e9 + second
    number = second * STEPS
    if second % 600 == 0:
        return make_epoch(second // 600, 0.5 + second / WEEK / 4, clock)
    if second % 600 == 1:
        return CheckpointSaved(time=clock, path="checkpoints/last.pt", step=number, epoch=second // 600)
    if second % 5 == 3:
        return GpuEvent(time=clock, gpus=GPUS)
    losses = [1.0 / (number - index) for index in range(STEPS, 0, -1)]
    return StepEvent(
        time=clock, step=number, epoch=second // 600 + 1, losses=losses, lr=0.1, images_per_second=5e3, data_wait=0.01
    )


def events(seconds: int) -> Iterator[Event]:
    yield make_run_started(1e9)
    yield from map(event_at, range(2, seconds))


def long_run(root: Path, seconds: int) -> RunFolder:
    folder = make_run_folder(root, "long")
    with folder.journal.open("w") as file:
        file.writelines(to_line(event) + "\n" for event in events(seconds))
    write_run_record(folder)
    return folder


def drain(folder: RunFolder) -> tuple[RunPoller, int]:
    """Return a poller that has read the whole journal, and the number of points that it found."""
    poller = RunPoller(folder)
    poller.poll()
    assert poller.caught_up
    return poller, poller.reader.curves.num_points


def test_runs_stop_and_logs_commands_never_read_journal(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> None:
    long_run(gputrain.runs, HOUR)

    def refuse(*_: object) -> None:
        raise AssertionError("the journal is read")

    monkeypatch.setattr(JournalReader, "poll_lines", refuse)
    monkeypatch.setenv("GPUTRAIN_RUNS", str(gputrain.runs))
    for command in ("runs", "stop", "logs"):
        arguments = [] if command == "runs" else ["long"]
        assert CliRunner().invoke(app, [command, *arguments]).exit_code == 0


@pytest.mark.soak
def test_run_of_one_week_is_listed_and_read(gputrain: Gputrain) -> None:
    folder = long_run(gputrain.runs, WEEK)
    folder.summary.write_text(json.dumps({"format": 1, "epochs": 1007}))
    print(f"\n{folder.journal.stat().st_size / 1e6:.0f} MB of journal")
    for _ in range(3):
        start_time = time.monotonic()
        listed = gputrain("runs", "--json")
        print(f"gputrain runs: {time.monotonic() - start_time:.2f} s")
    [row] = json.loads(listed.stdout)["runs"]
    assert (row["step"], row["epoch"]) == ((WEEK - 1) * STEPS, 1007)
    poller = RunPoller(folder)
    start_time = time.monotonic()
    poller.start()
    wait_for(lambda: poller.latest is not None, "the newest state", 5)
    newest = time.monotonic() - start_time
    poller.close()
    print(f"newest state of the poller: {newest:.3f} s")
    assert poller.latest is not None and poller.latest.row.step == row["step"]
    assert newest < 1.0
    start_time = time.monotonic()
    _, count = drain(folder)
    print(f"all {count} points: {time.monotonic() - start_time:.1f} s")
    assert count == WEEK - 1
    start_time = time.monotonic()
    history = folder.history()
    print(f"the history, as a resumed run reads it: {time.monotonic() - start_time:.1f} s")
    assert len(history.epochs) == (WEEK - 1) // 600

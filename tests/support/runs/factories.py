"""Factories for journal events, run folders and other inputs that several test modules share."""

from __future__ import annotations

import json
import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import Any

from engine.base.codec import asdict
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.jobs.launch.survivors import make_run_id
from engine.jobs.queue.state import QueueStage, QueueState
from engine.runs.control import MAX_REQUEST_BYTES
from engine.runs.events import EpochEvent, Event, RunFinished, RunStarted, StepEvent
from engine.runs.fields import Field, find_field
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import history_from_events
from engine.runs.journal import to_line
from engine.runs.labels import RunLabels, change_labels
from engine.runs.record_completion import read_journal_record
from engine.runs.records import RankDevice, RankEpochTiming
from engine.runs.run_config import changed_values
from engine.runs.run_record import RunRecord, StoredForm, read_back, stored_form, write_summary
from engine.runs.run_row import RunRow, read_row
from support.replace import replace
from support.runs.event_factories import make_command_started, make_epoch, make_run_started, make_step
from tui.screens.tables.runs import DEFAULT_COLUMNS

GPU_RANK_INFO = [RankDevice(rank, "h", rank, f"GPU-{rank}") for rank in range(4)]


def make_losses(first: int, last: int, loss: float = 0.5, time: float = 10.0) -> StepEvent:
    """Step event with one loss for each of the steps from `first` to `last`."""
    return replace(make_step(last, time=time), losses=[loss] * (last - first + 1))


def make_run_folder(root: Path, name: str, *events: Event) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.lock.touch()
    folder.journal.write_text("".join(to_line(event) + "\n" for event in events))
    write_run_record(folder)
    return folder


def make_command_run(root: Path, name: str) -> tuple[RunFolder, str]:
    """Run folder of a command without an owner, and the ID of its only start."""
    folder = make_run_folder(root, name)
    run_id = make_run_id(folder)
    folder.journal.write_text(to_line(make_command_started(1.0, name=name, run_id=run_id)) + "\n")
    write_run_record(folder)
    return folder, run_id


def write_run_record(folder: RunFolder) -> None:
    """Write the record of a run, as its owner does."""
    write_summary(folder.summary, read_journal_record(folder).record)


def write_config(folder: RunFolder, config: dict[str, Any]) -> None:
    """Write the config of a run, and its record."""
    folder.config.write_text(to_yaml(config))
    write_run_record(folder)


def make_row(name: str, state: str, folder: str | None = None, **fields: Any) -> RunRow:
    """Row of a run; `fields` are those of the row and of its record."""
    own = {key: fields.pop(key) for key in RunRow._fields if key in fields}
    return RunRow(name, folder or f"/runs/{name}", state, record=make_record(**fields), **own)


def make_record(**fields: Any) -> RunRecord:
    """Record of a run; `fields` are those of `summary.json`."""
    return read_back(StoredForm(**{"state": RunState.RUNNING, **fields}))


def with_fields(row: RunRow, **fields: Any) -> RunRow:
    """The row of a run with other fields of its record, which are those of `summary.json`."""
    known = asdict(stored_form(row.record))
    return row._replace(record=make_record(**known | fields))


def row_of(folder: RunFolder) -> RunRow:
    """Row of an existing run."""
    row = read_row(folder)
    assert row is not None
    return row


@cache
def step_lines(count: int, first: int = 1) -> str:
    def line(step: int) -> str:
        losses = [0.5] * 10
        event = StepEvent(time=1.0, step=step, epoch=1, losses=losses, lr=0.1, images_per_second=1.0, data_wait=0.0)
        return to_line(event) + "\n"

    return "".join(line(step) for step in range(first * 10, (first + count) * 10, 10))


def append_to_journal(folder: RunFolder, text: str) -> None:
    with folder.journal.open("a") as file:
        file.write(text)


def append_events(folder: RunFolder, *events: Event) -> None:
    append_to_journal(folder, "".join(to_line(event) + "\n" for event in events))
    write_run_record(folder)


def make_rank_timings(*ranks: tuple[float, float], seconds: float = 10.0) -> list[RankEpochTiming]:
    """Timings of an epoch of `seconds`; `ranks` are (data wait, forward pass) in seconds."""
    return [RankEpochTiming(rank, seconds, waited, forward) for rank, (waited, forward) in enumerate(ranks)]


def make_gpu_run_started(**fields: Any) -> RunStarted:
    """Start event of a run on four GPUs with 64 images per rank."""
    defaults = {
        "world_size": 4, "devices": [f"GPU-{rank}" for rank in range(4)], "ranks": GPU_RANK_INFO, "batch_size": 64,
        "cores": 8, "workers": 2, "pipeline": "stream",
    }  # fmt: skip
    return replace(make_run_started(), **defaults | fields)


def make_timed_epoch(**fields: Any) -> EpochEvent:
    """Epoch event of 10 s in which every rank took 12.8 ms per batch."""
    defaults = {"data_wait": 0.01, "images_per_second": 20_000.0, "rank_timings": make_rank_timings(*[(0.1, 3.0)] * 4)}
    return replace(make_epoch(2, time=100.0), **defaults | fields)


def make_ended_runs(root: Path, count: int, *, epochs: int = 3) -> list[RunFolder]:
    """Make the folders of runs that ended, as a training leaves them: config, journal, record, owner and lock.

    `run-0` is the oldest. Every seventh failed, and models, optimizers, learning rates and seeds differ.
    """
    folders, beginning = [], time.time() - 3600 * count
    for number in range(count):
        started = beginning + 3600 * number
        events: list[Event] = [make_run_started(started)]
        for epoch in range(1, epochs + 1):
            ended = started + 60 * epoch
            events += [make_step(10 * epoch, epoch, ended), make_epoch(epoch, epoch / 10, ended)]
        finished = RunFinished(time=started + 60 * epochs, state="failed" if number % 7 == 0 else "finished")
        folder = make_run_folder(root, f"run-{number}", *events, finished)
        model, optimizer = ("cnn", "resnet18", "vit_b_16")[number % 3], ("sgd", "adamw")[number % 2]
        changes = [f"run.seed={number % 10}", f"model.name={model}", f"optim.name={optimizer}", "data.dataset=digits"]
        text, changed = _config((*changes, f"optim.lr={0.1 / (number % 4 + 1)}"))
        folder.config.write_text(text)
        write_summary(folder.summary, history_from_events([*events, finished]).record(changed))
        folder.owner.write_text(json.dumps({"format": 1, "host": socket.gethostname(), "pid": 1, "heartbeat": None}))
        for path in (folder.config, folder.journal, folder.summary, folder.lock, folder.owner, folder.path):
            os.utime(path, (started, started))
        folders.append(folder)
    return folders


@cache
def _config(changes: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return the text of a config, and its values that differ from the defaults."""
    stored = as_stored(resolve_config(None, list(changes)).config)
    return to_yaml(stored), changed_values(stored)


def write_labels(folder: RunFolder, labels: RunLabels) -> None:
    """Replace the labels of a run. Raises UsageError as `change_labels` does."""
    change_labels(folder, lambda _: labels)


def default_fields() -> list[Field]:
    """Return the fields of the default columns of the run list."""
    return [find_field(name) for name in DEFAULT_COLUMNS]


def create_invalid_requests(control: Path) -> None:
    """Create one file of every kind that is not a valid request."""
    control.mkdir(exist_ok=True)
    outside = control.parent.parent / "outside.json"
    outside.write_text('{"format": 1, "request": "stop", "by": "me"}')
    (control / "1-link.json").symlink_to(outside)
    (control / "2-dangling.json").symlink_to("/nowhere")
    os.mkfifo(control / "3-fifo.json")
    (control / "4-folder.json").mkdir()
    (control / "4-folder.json" / "kept").write_text("")
    with (control / "5-large.json").open("wb") as file:
        file.truncate(1 << 40)
    (control / "6-incomplete.json").write_text('{"format": 1, "request": "st')
    (control / "7-list.json").write_text("[1]")
    (control / "8-deep.json").write_text("[" * (MAX_REQUEST_BYTES - 1))
    (control / "9-bytes.json").write_bytes(b"\xff\xfe\x00")
    (control / "91-later.json").write_text('{"format": 2, "request": "stop", "by": "me"}')
    (control / "92-none.json").write_text('{"request": "stop", "by": "me"}')
    (control / "98.txt").write_text("ignored")


def make_queue_state(**changes: Any) -> QueueState:
    """The place of a run that waits."""
    waiting = QueueState(
        submitted_at=1.0, position=1.0, priority=0, held=False, after=(), stage=QueueStage.WAITING, pid=0
    )
    return replace(waiting, **changes)


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

"""The readers of a run folder: valid documents, and the functions that gputrain calls."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from engine.base.codec import decode, encode, to_builtins
from engine.base.errors import UsageError
from engine.report.charts import run_charts
from engine.report.table import plain_lines
from engine.runs import ownership
from engine.runs.control import RequestCounters, consume_requests
from engine.runs.curves import Curves
from engine.runs.evaluations import mistakes
from engine.runs.event_lines import event_line
from engine.runs.events import CheckpointSaved, ControlEvent, GpuEvent, RankFailed, RunFinished, RunPaused, WarningEvent
from engine.runs.find import find_run, newest_first
from engine.runs.folder import RunFolder, list_runs
from engine.runs.history import History
from engine.runs.journal import JournalReader, to_line
from engine.runs.journal_source import JournalPoints
from engine.runs.ownership import Ownership, _owned_by_another, check_claim
from engine.runs.records import GpuSample
from engine.runs.run_record import StoredForm, read_back, stored_form
from engine.runs.run_row import open_run
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import default_fields, make_run_folder, row_of
from tui.charts.plot import plot
from tui.charts.view import ChartView, curves_for
from tui.screens.pollers.files import watch_evaluations
from tui.screens.pollers.run import RunPoller, read_log_tail
from tui.screens.run_progress import progress_line
from tui.screens.tables.confusion import matrix_lines
from tui.screens.tables.ranks import rank_lines
from tui.screens.tables.runs import fit_monitor_list, fit_run_list, listed_columns, monitor_line, run_list_line

HOST = os.uname().nodename


EVENTS = [
    *(make_run_started(), make_step(1), make_epoch(1), make_run_resumed(3, 5.0), make_step(4), make_epoch(2, 0.9)),
    *(
        WarningEvent(message="ä", code="no-effect"),
        CheckpointSaved(path="p", step=1, epoch=1),
        RunPaused(step=4, epoch=2),
    ),
    *(
        ControlEvent(request="stop", by="me", outcome="yes"),
        RankFailed(rank=0, device="cpu", cause="why", code="rank-failed"),
    ),
    GpuEvent(gpus=[GpuSample("GPU-1", "h", "ok", util=3.0, memory_used=5, throttle=["power"])]),
    RunFinished(state="finished"),
]
EVENT_DOCUMENTS = [json.loads(to_line(event)) for event in EVENTS]
OWNERS = [
    {"format": 1, "host": host, "pid": 7, "agents": ["n/1"], "user": "u", "heartbeat": heartbeat}
    for host in (HOST, "other")
    for heartbeat in (time.time(), 1.0, None)
]
SUMMARY = json.loads(encode(History().record({"optim.lr": 0.1})))
SUMMARY |= {"epochs": 3, "best_epoch": 2, "best_val_accuracy": 0.5, "val_loss": 1.0}
BOTTLENECK = {"kind": "waiting for data", "message": "slow"}
EVALUATION = {
    "epoch": 1, "loss": 0.5, "top1": 0.5, "top5": 1.0, "images": 4, "per_class": [0.5, None],
    "confusion": {"layout": "dense", "rows": [[1, 1], [0, 2]]},
}  # fmt: skip
SPARSE_EVALUATION = EVALUATION | {"confusion": {"layout": "sparse", "cells": [0, 3], "counts": [2, 2]}}


def run_file(name: str) -> Callable[[Path], Path]:
    """Return a function that makes a run folder and returns the path of one of its files."""

    def prepare(root: Path) -> Path:
        run = make_run_folder(root, "a", *EVENTS[:4])
        run.control.mkdir()
        return run.path / name

    return prepare


def read_owner(root: Path) -> None:
    # Without the wait for an owner that is about to exit.
    ownership._retry = lambda attempt: attempt()
    run = RunFolder(root / "a")
    run.is_owned()
    run.state(run.history().state)
    list_runs(root)
    find_run(root, "a")
    assert str(_owned_by_another(run, ""))
    with contextlib.suppress(UsageError):
        check_claim(root, "a", resume=True)
    Ownership(run).release()


def read_run(root: Path) -> None:
    """Read the journal like `gputrain runs`, `gputrain logs`, the screens and a resumed run."""
    run = RunFolder(root / "a")
    for event in JournalReader(run.journal).poll():
        assert (event_line(event) or "").isprintable()
    history = run.history()
    read_back(decode(encode(stored_form(history.record())), StoredForm))
    read_row_of_run(root)
    row = open_run(run)
    json.dumps(to_builtins(row.to_json()))
    for line in (
        *plain_lines(listed_columns([row]), [row]),
        monitor_line(fit_monitor_list([row], 10, 80), row),
        run_list_line(fit_run_list([row], 200, default_fields()), row),
        progress_line(row, 100),
    ):
        assert str(line).isprintable()
    feed = RunPoller(run)
    feed.poll()
    assert feed.latest is not None
    rank_lines(feed.latest.ranks, None, 80, 2)
    data, points, view = Curves(), JournalPoints(), ChartView()
    data.add([points.read(JournalReader(run.journal).poll())])
    for chart in run_charts(data):
        plot(curves_for(data, chart, view.axis), view.window(data, chart.id), 40, 8)


def read_row_of_run(root: Path) -> None:
    """Read the row of a list, from summary.json or without it from the journal."""
    folder = RunFolder(root / "a")
    row = row_of(folder)
    json.dumps(to_builtins(row.to_json()))
    plain_lines(listed_columns([row]), [row])
    newest_first([folder])


def read_requests(root: Path) -> None:
    counters = RequestCounters()
    for request in consume_requests(RunFolder(root / "a").control):
        event = ControlEvent(request=request.request, by=request.by, outcome=counters.apply(request.request))
        assert event_line(event)
        assert to_line(event).isprintable()


def read_evaluation(root: Path) -> None:
    poller = watch_evaluations(RunFolder(root / "a"))
    poller.poll()
    if (evaluations := poller.value) is None:
        assert poller.problem
        return
    for evaluation in (evaluations.last, evaluations.best):
        if evaluation.counts.size:
            mistakes(evaluation.counts)
            matrix_lines(list(evaluations.classes), evaluation.counts.tolist())


def read_log(root: Path) -> None:
    read_log_tail(RunFolder(root / "a").log)

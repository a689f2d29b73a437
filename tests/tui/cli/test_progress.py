"""Printers of headless runs: delivery order, closed streams, escaping."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runs.event_lines import TrainingProgress, event_line
from engine.runs.events import Event, PhaseChanged, RunContinued, RunFinished
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started, make_step
from tui.cli.command_output import DisconnectSafeStream
from tui.cli.progress import BackgroundPrinter, PlainPrinter, fitted_epoch_line


def test_disconnect_safe_stream_ignores_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        for safe_stream in (DisconnectSafeStream(stream), DisconnectSafeStream(None)):
            safe_stream.write("lost")
            safe_stream.flush()
            assert safe_stream.write("lost") == 4
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_background_printer_delivers_events_in_order_before_close(tmp_path: Path) -> None:
    printed: list[object] = []

    class CollectingPrinter(PlainPrinter):
        def __call__(self, event: object) -> None:
            printed.append(event)

    events = [make_run_started(), make_epoch(1), make_epoch(2), RunFinished(state="finished")]
    printer = BackgroundPrinter(CollectingPrinter())
    for event in events:
        printer(event)
    printer.close()
    assert printed == events


def test_plain_printer_shows_progress_of_long_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    # Steps of 2 s, fewer of them than `run.log_every`, and a pause of 300 s.
    started = replace(make_run_started(0.0), global_batch=10, steps_per_epoch=9)
    events: list[Event] = [started, PhaseChanged(time=0.0, phase="training", step=0, epoch=1)]
    events += [TrainingProgress(time=2.0 * step, step=step) for step in range(1, 7)]
    events.append(RunContinued(time=312.0, step=6, epoch=1))
    events += [TrainingProgress(time=300 + 2.0 * step, step=step) for step in range(7, 10)]
    events.append(PhaseChanged(time=330.0, phase="validating", step=9, epoch=1))
    events += [replace(make_epoch(1, time=335.0), step=9), make_step(10, 2, time=337.0)]
    events.append(PhaseChanged(time=335.0, phase="training", step=9, epoch=2))
    events.append(TrainingProgress(time=355.0, step=10))
    printer = PlainPrinter()
    for event in events:
        printer(event)
    assert [line for line in capsys.readouterr().err.splitlines() if "/9  " in line] == [
        "epoch   1  step 5/9  5 images/s  8s until validation",
        "epoch   1  step 7/9  5 images/s  4s until validation",
        "epoch   1  step 9/9  5 images/s  validating",
        "epoch   2  step 1/9  1 images/s  loss 0.5000  2m40s until validation",
    ]


def test_epoch_line_on_a_terminal_has_the_most_important_values_that_fit() -> None:
    scores = {"train_loss": 1.0986, "train_accuracy": 0.3333, "val_loss": 1.0986, "val_accuracy": 0.3333}
    epoch = replace(make_epoch(1), **scores, lr=0.0986, seconds=1.84, images_per_second=337.0)
    values = "epoch   1  train loss 1.0986 acc 0.3333  val loss 1.0986 acc 0.3333  lr 0.0986  1.8s  337 images/s"
    assert event_line(epoch) == fitted_epoch_line(epoch, 160) == values
    narrow = "epoch   1 train loss 1.0986 acc 0.3333 val loss 1.0986 acc 0.3333 lr 0.0986 1.8s"
    assert fitted_epoch_line(epoch, 80) == narrow
    assert fitted_epoch_line(epoch, 76).endswith("acc 0.3333 lr 0.0986")

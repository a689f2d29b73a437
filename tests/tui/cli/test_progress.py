"""Printers of headless runs: delivery order, closed streams, escaping."""

from __future__ import annotations

import errno
import os
import pty
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.runs.event_lines import event_line
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.start_events import RunStarting
from support.runs.factories import make_epoch, make_run_resumed, make_run_started, make_step
from tui.cli.progress import BackgroundPrinter, DisconnectSafeStream, PlainPrinter, ProgressPrinter


def test_disconnect_safe_stream_ignores_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        for safe_stream in (DisconnectSafeStream(stream), DisconnectSafeStream(None)):
            safe_stream.write("lost")
            safe_stream.flush()
            assert safe_stream.write("lost") == 4
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_disconnect_safe_stream_ignores_terminal_that_was_hung_up() -> None:
    controller, terminal = pty.openpty()
    os.close(controller)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.EIO))):
        os.write(terminal, b"lost")
    with os.fdopen(terminal, "w", buffering=1) as stream:
        safe_stream = DisconnectSafeStream(stream)
        assert safe_stream.write("lost\n") == 5
        safe_stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)


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


@pytest.mark.parametrize(
    ("runs", "name", "expected"),
    [
        (".", "a", ["next: `gputrain plot a`, `gputrain evaluate a`, `gputrain export a`"]),
        (
            ".",
            "a" * 12,
            [f"next: `gputrain plot {'a' * 12}`, `gputrain evaluate {'a' * 12}`", f"`gputrain export {'a' * 12}`"],
        ),
        ("my runs", "a", ["next: `gputrain plot '{}'`", "`gputrain evaluate '{}'`", "`gputrain export '{}'`"]),
    ],
    ids=["short", "long", "another folder"],
)
def test_plain_printer_names_next_commands_of_finished_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: str,
    name: str,
    expected: list[str],
) -> None:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    folder = tmp_path / runs / name
    for state in ("finished", "stopped"):
        printer = PlainPrinter()
        for event in (RunStarting(name=name, folder=str(folder)), RunFinished(state=state)):
            printer(event)
        lines = [line.strip() for line in capsys.readouterr().err.splitlines() if "gputrain" in line]
        assert lines == ([line.format(folder) for line in expected] if state == "finished" else [])


def test_plain_printer_shows_progress_of_long_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    # 100 steps of 2 s each.
    started = replace(make_run_started(0.0), global_batch=10, steps_per_epoch=100)
    steps = [replace(make_step(number, time=2.0 * number), images_per_second=5.0) for number in range(1, 101)]
    printer = PlainPrinter()
    for event in (started, *steps, replace(make_epoch(1, time=210.0), step=100), make_step(101, 2, time=212.0)):
        printer(event)
    lines = [line for line in capsys.readouterr().err.splitlines() if " step " in line]
    assert [line[len("epoch   1  ") :].partition("  ")[0] for line in lines] == [
        f"step {step}/100" for step in range(5, 100, 5)
    ]
    assert lines[0] == "epoch   1  step 5/100  train loss 0.5000  5 images/s  3m10s left in this epoch"


def test_printers_count_steps_of_resumed_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    # Resumed in the middle of the third epoch.
    resumed = replace(make_run_resumed(250, 0.0), global_batch=10, steps_per_epoch=100)
    step = replace(make_step(255, 3, time=10.0), images_per_second=5.0)
    plain, bar = PlainPrinter(), ProgressPrinter()
    for event in (resumed, step):
        plain(event)
        bar(event)
    bar.close()
    assert "epoch   3  step 55/100  " in capsys.readouterr().err
    assert [(task.description, task.completed) for task in bar._progress.tasks] == [("epoch 3/3", 55)]


def test_event_line_escapes_control_characters() -> None:
    line = event_line(WarningEvent(message="skipped: \x1b[2J\nname\udcff", code="bad-image"))
    assert line == "warning: skipped: \\x1b[2J\\nname\\udcff"

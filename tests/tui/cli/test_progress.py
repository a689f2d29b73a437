"""What a run says: to whoever listens, and to nobody."""

from __future__ import annotations

import os
from pathlib import Path

from engine.runs.event_lines import event_line
from engine.runs.events import RunFinished, WarningEvent
from factories import make_epoch, make_run_started
from tui.cli.progress import BackgroundPrinter, DisconnectSafeStream, PlainPrinter


def test_lasting_stream_ignores_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        for gone in (DisconnectSafeStream(stream), DisconnectSafeStream(None)):
            gone.write("lost")
            gone.flush()
            assert gone.write("lost") == 4
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_background_printer_delivers_events_in_order_before_close(tmp_path: Path) -> None:
    heard: list[object] = []

    class Ear(PlainPrinter):
        def __call__(self, event: object) -> None:
            heard.append(event)

    events = [make_run_started(), make_epoch(1), make_epoch(2), RunFinished(state="finished")]
    hear = BackgroundPrinter(Ear())
    for event in events:
        hear(event)
    hear.close()
    assert heard == events


def test_line_of_escapes_control_characters() -> None:
    line = event_line(WarningEvent(message="left out: \x1b[2J\nname\udcff"))
    assert line == "warning: left out: \\x1b[2J\\nname\\udcff"

"""What a run says: to whoever listens, and to nobody."""

from __future__ import annotations

import os
from pathlib import Path

from test_journal import epoch, started

from engine.runs.event_lines import event_line
from engine.runs.events import RunFinished, WarningEvent
from tui.cli.progress import BackgroundPrinter, DisconnectSafeStream, PlainPrinter


def test_a_stream_whose_reader_has_left_or_that_was_never_there_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        for gone in (DisconnectSafeStream(stream), DisconnectSafeStream(None)):
            gone.write("lost")
            gone.flush()
            assert gone.write("lost") == 4
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_events_are_heard_in_order_and_all_before_the_end(tmp_path: Path) -> None:
    heard: list[object] = []

    class Ear(PlainPrinter):
        def __call__(self, event: object) -> None:
            heard.append(event)

    events = [started(), epoch(1), epoch(2), RunFinished(state="finished")]
    hear = BackgroundPrinter(Ear())
    for event in events:
        hear(event)
    hear.close()
    assert heard == events


def test_a_name_from_outside_can_do_nothing_to_a_terminal() -> None:
    line = event_line(WarningEvent(message="left out: \x1b[2J\nname\udcff"))
    assert line == "warning: left out: \\x1b[2J\\nname\\udcff"

"""Records of event files: byte for byte those of TensorBoard's own library."""

from __future__ import annotations

import io
import math

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from engine.base.event_file import scalars_record, session_start_record, version_record

TIME = 1800000000.25
STEPS = [0, 1, 127, 128, 1 << 40]


def framed(event: Event) -> bytes:
    """Return the record that TensorBoard's library writes."""
    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()


def test_version_record_is_that_of_tensorboard() -> None:
    assert version_record(TIME) == framed(Event(wall_time=TIME, file_version="brain.Event:2"))


@pytest.mark.parametrize("step", STEPS)
def test_session_start_record_is_that_of_tensorboard(step: int) -> None:
    start = SessionLog(status=SessionLog.START)
    assert session_start_record(TIME, step) == framed(Event(wall_time=TIME, step=step, session_log=start))


@pytest.mark.parametrize("step", STEPS)
def test_scalars_record_is_that_of_tensorboard(step: int) -> None:
    scalars = {"loss": 0.1, "Präzision": math.nan, "x" * 300: 1e300, "zero": 0.0}
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    expected = framed(Event(wall_time=TIME, step=step, summary=Summary(value=values)))
    assert scalars_record(TIME, step, scalars) == expected

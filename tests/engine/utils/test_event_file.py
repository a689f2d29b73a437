"""Records of event files: byte for byte those of TensorBoard's own library."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from engine.foreign.tensorboard import EventFolder
from engine.utils.event_file import scalars_record, session_start_record, version_record
from support.foreign import points_of, values_of

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


def test_records_are_read_by_gputrain(tmp_path: Path) -> None:
    steps = [scalars_record(TIME, step, {"loss": 1 / step, "accuracy": 0.5}) for step in (1, 2)]
    start = [version_record(TIME), session_start_record(TIME, 1)]
    (tmp_path / "events.out.tfevents.1").write_bytes(b"".join([*start, *steps]))
    points = points_of(EventFolder(tmp_path))
    assert values_of(points, "loss") == [(1, 1.0), (2, 0.5)]
    assert values_of(points, "accuracy") == [(1, 0.5), (2, 0.5)]

"""Events that are parsed many at once: their points, and those of the other records between them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.watch.event_records import find_records, parse_scalars
from engine.watch.points import Point, Points
from engine.watch.tensorboard import EventFolder
from support.foreign import event, event_file, field, points_of, scalar

# The lengths of a summary, a value and a tag take two bytes from 128 on, that is with tags of 119, 121 and 128 bytes.
TAGS = st.sampled_from(["a", "loss/train", "größe", *("t" * length for length in (112, 120, 121, 128, 300))])
STEPS = st.one_of(st.just(0), st.integers(1, 300), st.integers(2**55 - 1, 2**55 + 1), st.integers(2**62, 2**63 - 1))
TIMES = st.sampled_from([0.0, 1.8e9, 1e300])
EVENTS = st.lists(st.tuples(TAGS, STEPS, st.floats(width=32, allow_nan=False), TIMES), max_size=20)


def read(content: bytes) -> list[Point]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "events.out.tfevents.1.host").write_bytes(content)
        return points_of(EventFolder(Path(folder)))


@given(EVENTS)
def test_events_have_the_points_that_were_written(events: list[tuple[str, int, float, float]]) -> None:
    content = event_file(*(event(step, scalar(tag, value), time=time) for tag, step, value, time in events))
    assert read(content) == [
        Point(tag, step, value, None, time if time == 1.8e9 else None) for tag, step, value, time in events
    ]


@given(EVENTS, st.lists(st.sampled_from([b"", b"\x09", field(1, 1.8e9), bytes(30), bytes(range(60))]), max_size=20))
def test_other_records_leave_the_points_in_order(
    events: list[tuple[str, int, float, float]], others: list[bytes]
) -> None:
    records = []
    for index, (tag, step, value, time) in enumerate(events):
        records += [event(step, scalar(tag, value), scalar("second", value), time=time), *others[index : index + 1]]
        records.append(event(step, scalar(tag, value), time=time))
    names = [name for tag, *_ in events for name in (tag, "second", tag)]
    assert [point.name for point in read(event_file(*records))] == names


@given(EVENTS, st.integers(0, 400), st.integers(0, 255))
def test_changed_byte_of_a_scalar_is_parsed_within_the_buffer(
    events: list[tuple[str, int, float, float]], position: int, byte: int
) -> None:
    content = bytearray(event_file(*(event(step, scalar(tag, value)) for tag, step, value, _ in events)))
    if position < len(content):
        content[position] = byte
    records = find_records(bytes(content))
    scalars = parse_scalars(bytes(content), records, lambda tag: tag.decode(errors="replace"))
    assert len(scalars.columns) + len(scalars.other_records) == len(records.starts) <= len(events)


def test_points_of_some_metrics_and_of_lower_steps_keep_their_order() -> None:
    points = Points([Point("b", 2, 1.5), Point("a", 3, 2.5), Point("b", 4, 3.5)])
    points.add_columns(Points([Point("a", 5, 1.0), Point("b", 1, 2.0)]).columns())
    assert points.only("b".__eq__) == [Point("b", 2, 1.5), Point("b", 4, 3.5), Point("b", 1, 2.0)]
    assert points.before(3) == [Point("b", 2, 1.5), Point("b", 1, 2.0)]
    assert points.names == {"a", "b"}

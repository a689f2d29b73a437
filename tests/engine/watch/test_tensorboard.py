"""TensorBoard event files: those of torch, TensorFlow's layout, and damaged, huge and growing ones."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.hparams import summary_v2

from engine.watch.event_records import length_checksum
from engine.watch.points import Point
from engine.watch.reading import Reading
from engine.watch.tensorboard import MAX_RECORD_BYTES, EventFolder
from support.foreign import event, event_file, field, frame, points_of, scalar, values_of

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"
FILE = "events.out.tfevents.1.host"


def poll(folder: Path) -> Reading:
    return EventFolder(folder).poll()


def tensor_value(tag: str, tensor: tensor_pb2.TensorProto, plugin: str) -> bytes:
    value = summary_pb2.Summary.Value(tag=tag, tensor=tensor)
    value.metadata.plugin_data.plugin_name = plugin
    return value.SerializeToString()


@pytest.mark.parametrize(
    ("folder", "parameters", "last"),
    [
        ("lightning/tb", {"lr": 0.1, "layers": "(2, 1)", "name": "tiny"}, ("val/loss", 23, 0.06940485537052155)),
        ("accelerate", {"lr": 0.05, "batch_size": 4, "name": "tiny"}, ("train/loss", 11, 0.5517557)),
        # With TensorFlow, as tensors.
        ("keras-events/validation", {}, ("epoch_loss", 5, 2.0227067)),
        ("tensorboardx", {"lr": 0.1, "bs": 4, "opt": "sgd", "amp": True}, ("loss", 4, 0.2)),
    ],
)
def test_event_folder_reads_recordings(
    folder: str, parameters: dict[str, object], last: tuple[str, int, float]
) -> None:
    reading = poll(RECORDINGS / folder)
    assert reading.parameters == parameters
    assert values_of(reading.points, last[0])[-1] == (last[1], pytest.approx(last[2], rel=1e-6))


@pytest.mark.parametrize(
    ("tensor", "plugin", "value"),
    [
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[0.5]), "scalars", 0.5),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=struct.pack("<f", 0.25)), "scalars", 0.25),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, double_val=[1e300]), "scalars", 1e300),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_INT64, int64_val=[-3]), "scalars", -3.0),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_INT32, int_val=[300]), "scalars", 300.0),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_HALF, half_val=[0x3C00]), "scalars", 1.0),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[b"text"]), "scalars", None),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[1.0, 2.0]), "scalars", None),
        (tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[0.5]), "pr_curves", None),
    ],
)
def test_event_folder_reads_scalar_tensors(
    tmp_path: Path, tensor: tensor_pb2.TensorProto, plugin: str, value: float | None
) -> None:
    (tmp_path / FILE).write_bytes(event_file(event(4, tensor_value("loss", tensor, plugin))))
    assert [point[:3] for point in poll(tmp_path).points] == ([("loss", 4, value)] if value is not None else [])


def test_event_folder_reads_hyperparameters_of_keras(tmp_path: Path) -> None:
    summary = summary_v2.hparams_pb({"units": 16, "dropout": 0.5, "relu": False})
    (tmp_path / FILE).write_bytes(event_file(event_pb2.Event(summary=summary).SerializeToString()))
    assert poll(tmp_path).parameters == {"units": 16, "dropout": 0.5, "relu": False}


def test_event_folder_follows_growth_in_any_pieces(tmp_path: Path) -> None:
    content = event_file(*(event(step, scalar("loss", step)) for step in range(20)))
    source, points = EventFolder(tmp_path), []
    with (tmp_path / FILE).open("wb", buffering=0) as file:
        for start in range(0, len(content), 7):
            file.write(content[start : start + 7])
            reading = source.poll()
            assert (reading.drop_from, reading.problem) == (None, None)
            points += reading.points
    assert values_of(points, "loss") == [(step, float(step)) for step in range(20)]


def test_event_folder_skips_large_record_unread(tmp_path: Path) -> None:
    image_bytes = 1 << 32
    image = struct.pack("<QI", image_bytes, length_checksum(image_bytes))
    with (tmp_path / FILE).open("wb") as file:
        file.write(event_file(event(1, scalar("loss", 1.0))) + image)
        file.seek(image_bytes + 4, os.SEEK_CUR)
        file.write(event_file(event(2, scalar("loss", 2.0))))
    source = EventFolder(tmp_path)
    assert values_of(points_of(source), "loss") == [(1, 1.0), (2, 2.0)]


def test_event_folder_waits_for_end_of_large_record(tmp_path: Path) -> None:
    large = frame(event(1, field(1, b"x" * MAX_RECORD_BYTES)))
    path, source = tmp_path / FILE, EventFolder(tmp_path)
    path.write_bytes(event_file(event(0, scalar("loss", 1.0))) + large[:-1])
    assert len(source.poll().points) == 1
    with path.open("ab") as file:
        file.write(large[-1:] + event_file(event(2, scalar("loss", 2.0))))
    assert values_of(points_of(source), "loss") == [(2, 2.0)]


def test_event_folder_reads_rotated_files(tmp_path: Path) -> None:
    source = EventFolder(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / f"events.out.tfevents.{number}.host").write_bytes(event_file(event(number, scalar("a", number))))
        assert values_of(source.poll().points, "a") == [(number, float(number))]
    with (tmp_path / FILE).open("ab") as file:
        file.write(event_file(event(9, scalar("a", 9.0))))
    assert values_of(source.poll().points, "a") == [(9, 9.0)]


@pytest.mark.parametrize("is_shorter", [False, True])
def test_event_folder_starts_over_when_file_is_replaced(tmp_path: Path, is_shorter: bool) -> None:
    source, path = EventFolder(tmp_path), tmp_path / FILE
    path.write_bytes(event_file(*(event(step, scalar("a", 1.0)) for step in range(10))))
    assert len(source.poll().points) == 10
    count = 5 if is_shorter else 15
    path.write_bytes(event_file(*(event(step, scalar("a", 2.0)) for step in range(count))))
    readings = [source.poll() for _ in range(3)]
    assert [reading.drop_from for reading in readings if reading.drop_from is not None] == [-math.inf]
    assert [point.value for reading in readings for point in reading.points] == [2.0] * count


def losses(first_time: float, steps: range) -> bytes:
    return event_file(
        *(event(step, scalar("loss", first_time + step), time=1.8e9 + first_time + step) for step in steps)
    )


def follow(folder: EventFolder, points: list[Point]) -> list[Point]:
    """Return points with those of further polls."""
    for _ in range(4):
        reading = folder.poll()
        from_step = math.inf if reading.drop_from is None else reading.drop_from
        points = [point for point in points if point.step < from_step] + list(reading.points)
    return points


@pytest.mark.parametrize("is_live", [True, False])
def test_event_folder_tells_two_writers_at_once_apart(tmp_path: Path, is_live: bool) -> None:
    folder, first = EventFolder(tmp_path), tmp_path / "events.out.tfevents.1.a"
    first.write_bytes(losses(0, range(3)))
    points = follow(folder, [])
    (tmp_path / "events.out.tfevents.2.b").write_bytes(losses(2.5, range(4)))
    points = follow(folder, points)
    first.write_bytes(losses(0, range(6)))
    points = follow(folder, points) if is_live else follow(EventFolder(tmp_path), [])
    assert values_of(points, "loss") == [(step, float(step)) for step in range(6)]
    assert values_of(points, "writer2/loss") == [(step, step + 2.5) for step in range(4)]


def test_event_folder_reads_restart_after_cut_record_once(tmp_path: Path) -> None:
    folder = EventFolder(tmp_path)
    (tmp_path / "events.out.tfevents.1.a").write_bytes(losses(0, range(6))[:-3])
    (tmp_path / "events.out.tfevents.2.b").write_bytes(losses(10, range(3, 6)))
    assert values_of(follow(folder, []), "loss")[2:] == [(2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert folder.poll().drop_from is None


def test_event_folder_reads_other_files_beside_damaged_one(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(event_file(event(1, scalar("a", 1.0))) + bytes(100))
    (tmp_path / "events.out.tfevents.2.host").write_bytes(event_file(event(2, scalar("a", 2.0))))
    reading = poll(tmp_path)
    assert values_of(reading.points, "a") == [(1, 1.0), (2, 2.0)]
    assert reading.problem is not None and FILE in reading.problem
    assert reading.share < 1


def test_event_folder_opens_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(event_file(event(1, scalar("a", 1.0))))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / FILE).symlink_to(outside)
    os.mkfifo(folder / "events.out.tfevents.2.host")
    assert poll(folder) == Reading()

"""JSON lines, and Hugging Face's trainer states."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from engine.watch import row_files
from engine.watch.folders import find_runs
from engine.watch.json_lines import JsonLines
from engine.watch.points import Point
from engine.watch.reading import list_folder
from engine.watch.trainer_state import STATE_FILE, TrainerStates
from support.foreign import points_of, values_of


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_history(count: int) -> list[dict[str, Any]]:
    return [{"epoch": step / 100, "loss": 1 / step, "step": step} for step in range(1, count + 1)]


def write_state(folder: Path, history: list[dict[str, Any]]) -> Path:
    """Write a state as `TrainerState.save_to_json` of transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "best_metric": None, "epoch": 1.0, "global_step": 3, "log_history": history, "max_steps": 100,
        "stateful_callbacks": {"TrainerControl": {"args": {}}}, "train_batch_size": 8,
    }  # fmt: skip
    path = folder / STATE_FILE
    path.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    return path


def test_json_lines_reads_nested_numbers(tmp_path: Path) -> None:
    row = {"step": 3, "epoch": 0.5, "loss": 1, "val": {"acc": 0.5}, "ok": True, "note": "x", "bad": "NaN", "l": [1]}
    points = points_of(JsonLines(write_lines(tmp_path / "log.jsonl", row)))
    assert points[:2] == [Point("loss", 3, 1.0, 0.5), Point("val.acc", 3, 0.5, 0.5)]
    assert points[2].name == "bad" and math.isnan(points[2].value)
    assert len(points) == 3


def test_json_lines_passes_over_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    many_digits = b'{"step": 2, "a": %s}' % (b"9" * 5000)
    lines = [b'{"step": 1, "a": 1}', b"\xff\xfe{}", b"[1]", b"", b"{" * 50_000, many_digits]
    path.write_bytes(b"\n".join([*lines, b'{"step": 3, "a": 3}', b'{"step": 4, "a"']))
    assert values_of(JsonLines(path).poll().points, "a") == [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"step": 1, "loss": 2}], True),
        ([{"config": "text"}, {"epoch": 1, "train_loss": 2}], True),
        ([{"text": "a cat", "label": 3}], False),
        ([{"epoch": 1}], False),
        ([], False),
    ],
)
def test_lines_are_a_log_by_the_first_ones(tmp_path: Path, rows: list[object], expected: bool) -> None:
    write_lines(tmp_path / "log.jsonl", *rows)
    assert bool(row_files.find(list_folder(tmp_path))) == expected


def test_batches_of_a_validation_are_no_step(tmp_path: Path) -> None:
    rows = [{"mode": mode, "epoch": 1, "iter": step, "loss": 2.0} for mode, step in (("train", 50), ("val", 20))]
    reading = JsonLines(write_lines(tmp_path / "log.json", *rows)).poll()
    assert [(point.name, point.step) for point in reading.points] == [("loss", 50), ("val/loss", 50)]
    assert not reading.restarts


@pytest.mark.parametrize("indent", [None, 2])
def test_objects_one_behind_another_are_rows(tmp_path: Path, indent: int | None) -> None:
    text = "".join(json.dumps({"step": step, "loss": step / 2}, indent=indent) for step in range(3))
    (tmp_path / "metrics.json").write_text(text + '{"step": 3, ')
    (log,) = find_runs(tmp_path).runs[0].logs
    assert log.open().poll().points == [Point("loss", step, step / 2) for step in range(3)]


def test_trainer_states_follows_newest_checkpoint(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-5", make_history(5))
    (run,) = find_runs(tmp_path).runs
    assert (run.name, run.formats) == (tmp_path.name, ("trainer-state",))
    source = run.logs[0].open()
    assert len(source.poll().points) == 5
    assert source.poll().points == []
    path = write_state(tmp_path / "checkpoint-10", make_history(10))
    os.utime(path, (2e9, 2e9))
    reading = source.poll()
    assert (reading.drop_from, len(reading.points)) == (-math.inf, 10)


@pytest.mark.parametrize("history", [[], [{"step": 1, "sizes": [1, 2], "x": '], "y'}], [{"step": 1}] * 20_000])
def test_trainer_states_has_scalars_around_history_as_parameters(tmp_path: Path, history: list[object]) -> None:
    state = {"epoch": 2.0, "log_history": history, "max_steps": 100, "stateful_callbacks": {"a": [[1], {"b": [2]}]}}
    (tmp_path / STATE_FILE).write_text(json.dumps(state, indent=2))
    reading = TrainerStates(tmp_path).poll()
    assert (reading.parameters, reading.problem) == ({"epoch": 2.0, "max_steps": 100}, None)


@pytest.mark.parametrize("end", [b"", b'{"step": 3, "loss": 1', b"x" * 100])
def test_trainer_states_reads_complete_entries_of_torn_file(tmp_path: Path, end: bytes) -> None:
    path = write_state(tmp_path, make_history(2))
    path.write_bytes(path.read_bytes().partition(b"\n  ],")[0] + b"," + end)
    reading = TrainerStates(tmp_path).poll()
    assert values_of(reading.points, "loss") == [(1, 1.0), (2, 0.5)]
    assert reading.problem
    assert reading.share == 1.0


def test_trainer_states_opens_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    outside = write_state(tmp_path / "outside", make_history(2))
    run = tmp_path / "run"
    run.mkdir()
    (run / STATE_FILE).symlink_to(outside)
    assert TrainerStates(run).poll().points == []
    (run / STATE_FILE).unlink()
    os.mkfifo(run / STATE_FILE)
    assert TrainerStates(run).poll().points == []


def test_history_of_many_megabytes_is_a_log(tmp_path: Path) -> None:
    values = [index / 7 for index in range(100_000)]
    (tmp_path / "history.json").write_text(json.dumps({"loss": values, "val_loss": values}))
    [run] = find_runs(tmp_path).runs
    assert values_of(points_of(run.logs[0].open()), "val_loss")[-1] == (99_999, values[-1])

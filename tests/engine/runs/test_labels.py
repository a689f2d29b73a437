"""Labels of runs: tags, note and archive flag, and files that someone else wrote."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from engine.runs.folder import RunFolder
from engine.runs.labels import NO_LABELS, RunLabels, change_labels, read_labels
from support.messages import raises_problem
from support.runs.factories import make_run_folder, write_labels


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a")


def test_labels_change_keeps_other_labels_and_unknown_fields(folder: RunFolder) -> None:
    folder.labels.write_text('{"format": 1, "color": "red", "tags": ["old"]}')
    change_labels(folder, lambda labels: labels.with_tags(["night", "old"], ["gone"]))
    change_labels(folder, lambda labels: RunLabels(tags=labels.tags, note="a note", archived=True))
    assert read_labels(folder) == RunLabels(tags=("old", "night"), note="a note", archived=True)
    assert json.loads(folder.labels.read_text())["color"] == "red"
    write_labels(folder, NO_LABELS)
    assert read_labels(folder) == NO_LABELS


def test_labels_that_are_a_link_are_neither_read_nor_written_through(tmp_path: Path) -> None:
    folder, other = make_run_folder(tmp_path, "a"), tmp_path / "other.json"
    other.write_text('{"format": 1, "tags": ["night"]}')
    folder.labels.symlink_to(other)
    assert read_labels(folder) == NO_LABELS
    with raises_problem("not-writable", "a"):
        write_labels(folder, RunLabels(tags=("mine",)))
    assert other.read_text() == '{"format": 1, "tags": ["night"]}'


@pytest.mark.parametrize(
    ("labels", "code", "location", "values"),
    [
        (RunLabels(tags=("a b",)), "invalid-value", "a b", []),
        (RunLabels(tags=tuple(map(str, range(21)))), "too-many", "tags", [21, 20]),
        (RunLabels(note="x" * 2001), "too-large", "note", [2001]),
        (RunLabels(note="\ud800"), "invalid-value", "note", ["UTF-8"]),
    ],
)
def test_invalid_labels_are_refused_and_not_written(
    folder: RunFolder, labels: RunLabels, code: str, location: str, values: list[object]
) -> None:
    with raises_problem(code, location, *values):
        write_labels(folder, labels)
    assert not folder.labels.exists()


def test_labels_of_foreign_run_are_read_and_not_written(folder: RunFolder) -> None:
    folder.labels.write_text('{"format": 1, "tags": ["night"]}')
    folder.path.chmod(0o777)
    assert read_labels(folder).tags == ("night",)
    with raises_problem("foreign-owner", "a"):
        write_labels(folder, NO_LABELS)


def test_labels_changed_by_many_threads_lose_none(folder: RunFolder) -> None:

    def add(tag: str) -> None:
        change_labels(folder, lambda labels: labels.with_tags([tag]))

    threads = [threading.Thread(target=add, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_labels(folder).tags) == {f"t{number}" for number in range(8)}


def test_labels_file_is_no_more_open_than_run_folder(folder: RunFolder) -> None:
    folder.path.chmod(0o700)
    write_labels(folder, RunLabels(tags=("mine",)))
    assert folder.labels.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ('{"format": 1, "tags": ["night", 5]}', "damaged", []),
        ('{"format": 2, "tags": ["night"]}', "wrong-version", ["format 2", "format 1"]),
    ],
)
def test_labels_that_cannot_be_read_count_as_none_and_are_not_overwritten(
    folder: RunFolder, text: str, code: str, values: list[str]
) -> None:
    folder.labels.write_text(text)
    assert read_labels(folder) == NO_LABELS
    with raises_problem(code, "a", "labels.json", *values):
        write_labels(folder, NO_LABELS)
    assert folder.labels.read_text() == text

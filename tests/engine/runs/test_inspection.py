"""Lists that rank inspected images, and the file that has them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.base.codec import InvalidRecordError
from engine.runs.folder import RunFolder
from engine.runs.inspection import (
    LIST_NAMES,
    MAX_INSPECTION_BYTES,
    Inspection,
    ListName,
    read_inspection,
    write_inspection,
)
from support.messages import raises_problem
from support.runs.inspections import make_info, make_inspection

IMAGES = make_inspection(
    [[0.9, 0.1, 0.0], [0.3, 0.6, 0.1], [0.05, 0.9, 0.05], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8], [0.5, 0.5, 0.0]],
    [0, 0, 0, 1, 2, 1],
    parts=[1, 1, 0, 1, 1, 0],
)


def test_cell_lists_its_images_by_descending_loss() -> None:
    assert list(IMAGES.cell(0, 1)) == [2, 1]
    assert list(IMAGES.cell(0, 1, "val")) == [1]
    assert list(IMAGES.cell(0, 1, limit=1)) == [2]
    assert list(IMAGES.cell(2, 0)) == []


@pytest.mark.parametrize(
    ("name", "limit", "ranked"),
    [("mistakes", None, [2, 1, 5, 3]), ("uncertain", 3, [5, 3, 1])],
    ids=["probability of the wrong class", "gap between the best classes"],
)
def test_images_are_ranked(name: ListName, limit: int | None, ranked: list[int]) -> None:
    assert list(IMAGES.ranked(name, limit=limit)) == ranked


def test_suspected_labels_prefer_images_above_the_threshold_of_the_predicted_class() -> None:
    """The model is sure of owls and never of cats, so a 0.6 for cat is more suspect than a 0.7 for owl."""
    cats, owls = [[0.5, 0.3, 0.2]] * 10, [[0.0, 0.02, 0.98]] * 10
    images = make_inspection([*cats, *owls, [0.25, 0.05, 0.7], [0.6, 0.1, 0.3]], [0] * 10 + [2] * 10 + [0, 2])
    assert list(images.ranked("label-issues")) == [21, 20]
    assert list(images.ranked("mistakes")) == [20, 21]


def test_suspected_labels_have_a_threshold_for_each_part() -> None:
    """A model that is sure of its training images would else leave no image of the validation set above it."""
    train, val = [[0.99, 0.01, 0.0]] * 20, [[0.6, 0.3, 0.1]] * 5
    images = make_inspection(
        [*train, *val, [0.7, 0.3, 0.0], [0.9, 0.05, 0.05]], [0] * 25 + [1, 1], parts=[0] * 20 + [1] * 6 + [0]
    )
    assert list(images.ranked("label-issues")) == [25, 26]


def test_lists_accept_numbers_that_are_not_finite() -> None:
    images = make_inspection([[np.nan] * 3, [0.1, 0.9, 0.0]], [1, 0])
    for name in LIST_NAMES:
        assert sorted(images.ranked(name)) == [0, 1]
    assert np.isnan(images.image(0).loss)


def test_images_without_files_are_named_by_part_and_index() -> None:
    named = make_inspection([[1.0, 0.0, 0.0]], [1], paths=["cat/1.png"])
    assert (IMAGES.image(2).name, named.image(0).name) == ("train 2", "cat/1.png")
    assert (named.image(0).label, named.image(0).predicted, named.image(0).probability) == (1, 0, 1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"epoch": 6}, "is of epoch 6, not of epoch 7 or 9"),
        ({"epoch": None}, "is of step 70, not of epoch 7 or 9"),
        ({"part": "train"}, "is of the training images"),
        ({"overrides": ("data.path=/other",)}, "is of other data (data.path=/other)"),
    ],
)
def test_stale_reason_compares_with_the_epochs_of_the_evaluation(
    changes: dict[str, object], reason: str | None
) -> None:
    assert make_info(**changes).stale_reason((9, 7)) == reason


TABLE = [[0.9, 0.1, 0.0], [0.3, 0.6, 0.1], [0.1, 0.2, 0.7]]
PATHS = ["cat/1.png", "cat/\udcff 2.png", "dog/ü.jpg"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write_example(run: RunFolder) -> Inspection:
    pictures = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    written = make_inspection(
        TABLE, [0, 0, 1], paths=PATHS, thumbnail_rows=np.array([0, 2]), thumbnails=pictures, info={"unread": ("x",)}
    )
    write_inspection(run, written)
    return written


def test_read_inspection_returns_what_was_written(run: RunFolder) -> None:
    written = write_example(run)
    read = read_inspection(run)
    assert read is not None and read.info == written.info and list(read.paths or ()) == PATHS
    assert read.images(range(3)) == written.images(range(3))
    assert np.array_equal(read.thumbnail(2), written.thumbnails[1]) and read.thumbnail(1) is None
    assert [path.name for path in run.path.iterdir()] == ["inspection.npz"]


def test_read_inspection_of_other_run_is_none(run: RunFolder) -> None:
    assert read_inspection(run) is None


def test_read_inspection_survives_no_damage_unnoticed(run: RunFolder) -> None:
    write_example(run)
    intact = run.inspection.read_bytes()
    for size in range(0, len(intact) - 1, 29):
        run.inspection.write_bytes(intact[:size])
        with raises_problem("damaged", kind=InvalidRecordError):
            read_inspection(run)


def rewrite(run: RunFolder, **changes: Callable[[Any], Any]) -> None:
    """Change arrays of the file; a change that returns None removes one."""
    with np.load(run.inspection) as stored:
        arrays = {name: changes.get(name, lambda array: array)(stored[name]) for name in stored.files}
    np.savez(run.inspection, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]


def changed_info(**changes: object) -> Callable[[Any], Any]:
    return lambda array: np.frombuffer(json.dumps(json.loads(array.tobytes()) | changes).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"label": lambda array: array + 3}, "damaged"),
        ({"predicted": lambda array: -array - 1}, "damaged"),
        ({"loss": lambda _: None}, "damaged"),
        ({"loss": lambda array: array.astype(object)}, "damaged"),
        ({"paths": lambda array: array[:3]}, "damaged"),
        ({"thumbnails": lambda _: np.zeros((2, 65, 65, 1), np.uint8)}, "damaged"),
        ({"thumbnail_rows": lambda array: array + 2}, "damaged"),
        ({"info": changed_info(format=2)}, "wrong-version"),
    ],
)
def test_read_inspection_refuses_arrays_that_do_not_fit(
    run: RunFolder, changes: dict[str, Callable[[Any], Any]], code: str
) -> None:
    write_example(run)
    rewrite(run, **changes)
    with raises_problem(code, kind=InvalidRecordError):
        read_inspection(run)


def test_read_inspection_refuses_arrays_that_expand_without_end(run: RunFolder) -> None:
    write_example(run)
    with zipfile.ZipFile(run.inspection) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(run.inspection, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        # The directory at the end of the archive says how large a member is.
        archive.getinfo("thumbnails.npy").file_size = MAX_INSPECTION_BYTES
    with raises_problem("damaged", None, "512 MiB", kind=InvalidRecordError):
        read_inspection(run)


def test_read_inspection_opens_regular_files_only(run: RunFolder, tmp_path: Path) -> None:
    write_example(run)
    run.inspection.rename(tmp_path / "elsewhere.npz")
    run.inspection.symlink_to(tmp_path / "elsewhere.npz")
    with raises_problem("not-readable", kind=InvalidRecordError):
        read_inspection(run)

"""The file of an inspection: what is written is read again, and what others wrote is checked."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runs.folder import RunFolder
from engine.runs.inspection import (
    MAX_INSPECTION_BYTES,
    Inspection,
    read_inspection,
    write_inspection,
)
from engine.utils.codec import InvalidRecordError
from support.messages import raises_problem
from support.runs.inspections import make_inspection

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

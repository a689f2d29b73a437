"""The path of the data decides the dataset, and stands for a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from support.messages import raises_problem


@pytest.mark.parametrize(
    ("name", "dataset"),
    [("train-{000..146}.tar", "webdataset"), ("photos", "folder"), ("a.photos", "folder")],
)
def test_resolve_finds_dataset_by_the_name_of_its_path(tmp_path: Path, name: str, dataset: str) -> None:
    path = tmp_path / name
    resolved = resolve_config(flags={"data.path": (f"--data-path {path}", str(path))})
    assert (resolved.config.data.dataset, resolved.config.data.path) == (dataset, str(path))
    assert resolved.sources["data.dataset"] == f"--data-path {path}"


@pytest.mark.parametrize(("name", "dataset"), [("train.tar", "webdataset"), ("photos", "folder")])
def test_resolve_takes_dataset_for_config(tmp_path: Path, name: str, dataset: str) -> None:
    path = tmp_path / name
    path.touch() if path.suffix else path.mkdir()
    resolved = resolve_config(str(path), ["run.epochs=2"])
    assert (resolved.config.data.dataset, resolved.config.data.path) == (dataset, str(path))
    assert resolved.sources["data.path"] == str(path)


@pytest.mark.parametrize("keys", [("data.path=photos.gpk",), ("data.dataset=packed", "data.path=photos")])
def test_resolve_refuses_packed_file_with_the_line_that_replaces_it(keys: tuple[str, ...]) -> None:
    with raises_problem("not-supported", keys[0].partition("=")[0], "`gputrain data pack FOLDER -o DIR`"):
        resolve_config(None, keys)

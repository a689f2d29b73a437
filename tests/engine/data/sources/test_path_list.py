"""Paths in one buffer: the same sequence as a tuple of strings."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from engine.data.sources import path_list
from engine.data.sources.path_list import PathList, encode_paths

PATHS = ["cat/1.jpg", "cat/\udce2.jpg", "cat/é\n.jpg", "cat/\udce2", "dog/" + "d" * 300, "dog/2", "dog/犬.png"]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> PathList:
    monkeypatch.setattr(path_list, "CHUNK_PATHS", 2)
    paths = PathList.of_buffer(b"".join(encode_paths(group) for group in (PATHS[:4], [], PATHS[4:])))
    assert len(paths) == len(PATHS)
    return paths


def test_path_list_is_the_sequence_of_its_paths(paths: PathList) -> None:
    assert list(paths) == [paths[index] for index in range(len(paths))] == PATHS
    assert (paths[-1], list(paths[1:6:2]), list(paths[::-1])) == (PATHS[-1], PATHS[1:6:2], PATHS[::-1])
    assert list(pickle.loads(pickle.dumps(paths))) == PATHS
    with pytest.raises(IndexError):
        paths[len(PATHS)]


def test_path_list_selects_paths_from_the_same_buffer(paths: PathList) -> None:
    selected = paths.select(np.array([0, 3, 6]))
    assert list(selected) == [PATHS[0], PATHS[3], PATHS[6]]
    assert list(selected.select(np.array([1, 2]))[1:]) == [PATHS[6]]
    assert len(pickle.dumps((paths, selected))) < len(pickle.dumps(paths)) + 500


def test_empty_path_list_has_no_path() -> None:
    assert list(PathList.of_buffer(b"")) == []

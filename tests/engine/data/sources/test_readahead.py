"""Advice to the kernel about images that are read soon."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.config.loader import resolve_config
from engine.data.sampler import BatchRequest, DistributedBatchSampler, Indices, Part
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.open import open_source
from engine.data.sources.readahead import MAX_ADVISED_BYTES, MAX_GAP_BYTES, advise_ranges, read_ahead
from support.data.tar_shards import write_shards

WAIT_SECONDS = 20.0


@pytest.fixture
def source(tmp_path: Path) -> EncodedSource:
    pattern = write_shards(tmp_path)
    source = open_source(resolve_config(None, ["data.dataset=webdataset", f"data.path={pattern}"]).config)
    assert isinstance(source, EncodedSource)
    return source


class Prepared:
    """The indices that a source was asked to prepare."""

    def __init__(self, source: EncodedSource, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Part, list[int]]] = []
        monkeypatch.setattr(type(source), "prepare", self._prepare)

    def _prepare(self, part: Part, indices: Indices) -> None:
        self.calls.append((part, indices.tolist()))

    def wait_for(self, count: int) -> list[tuple[Part, list[int]]]:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self.calls) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.calls


def make_requests(*batches: tuple[Part, list[int]]) -> Iterator[BatchRequest]:
    return (BatchRequest(part, 1, np.array(indices)) for part, indices in batches)


def test_advise_ranges_merges_neighbors_in_order_of_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: advised.append((offset, size)))
    far = 10 * MAX_ADVISED_BYTES
    advise_ranges(0, np.array([far, 600, 0, far + 100]), np.array([100, 50, 200, MAX_ADVISED_BYTES]))
    assert advised == [(0, 650), (far, MAX_ADVISED_BYTES), (far + MAX_ADVISED_BYTES, 100)]
    advised.clear()
    advise_ranges(0, np.array([0, 1 + MAX_GAP_BYTES + 1]), np.array([1, 1]))
    assert len(advised) == 2


def test_advise_ranges_brings_ranges_into_page_cache(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 8 << 20
    with path.open("w+b") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if _reads_from_memory(file.fileno(), size // 2):
            pytest.skip("the file system keeps all pages in memory")
        advise_ranges(file.fileno(), np.array([0]), np.array([size]))
        deadline = time.monotonic() + WAIT_SECONDS
        while not _reads_from_memory(file.fileno(), size - mmap.PAGESIZE) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(_reads_from_memory(file.fileno(), offset) for offset in range(0, size, 1 << 20))


def _reads_from_memory(fd: int, offset: int) -> bool:
    """Whether a page of a file is in the page cache (preadv2(2), RWF_NOWAIT)."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_read_ahead_prepares_next_images_in_storage_order(
    source: EncodedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared(source, monkeypatch)
    batches: list[tuple[Part, list[int]]] = [
        *(("train", [9, 2]), ("train", [5, 0])),
        *(("train", [8, 1]), ("train", [7, 3])),
        *(("val", [1, 0]), ("val", [2, 3])),
    ]
    requests = read_ahead(make_requests(*batches), source, 4)
    next(requests)
    first = [("train", [0, 2, 5, 9]), ("train", [1, 3])]
    assert prepared.wait_for(2) == first
    assert [request.indices.tolist() for request in requests] == [indices for _, indices in batches[1:]]
    assert prepared.wait_for(5) == [*first, ("train", [7, 8]), ("val", [0, 1]), ("val", [2, 3])]


def test_read_ahead_prepares_each_image_of_an_epoch_once(
    source: EncodedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared(source, monkeypatch)
    sampler = DistributedBatchSampler(1000, 50, 7, 0, 1, False, 0)
    requests = list(read_ahead(sampler.requests(1), source, 64))
    assert [r.indices.tolist() for r in requests] == [r.indices.tolist() for r in sampler.requests(1)]
    deadline = time.monotonic() + WAIT_SECONDS
    while sum(len(indices) for _, indices in prepared.calls) < 1050 and time.monotonic() < deadline:
        time.sleep(0.001)
    for part, count in (("train", 1000), ("val", 50)):
        assert sorted(index for name, piece in prepared.calls if name == part for index in piece) == list(range(count))


def test_read_ahead_ends_its_thread_with_the_iterator(source: EncodedSource) -> None:
    requests = read_ahead(make_requests(("train", [1]), ("train", [2])), source, 1)
    next(requests)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
    requests.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_tar_source_prepares_images_of_several_shards(source: EncodedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: advised.append((fd, size)))
    source.prepare("train", np.arange(source.num_images("train")))
    assert len({fd for fd, _ in advised}) == 3
    assert sum(size for _, size in advised) > sum(len(source.read_encoded("train", index).data) for index in range(20))

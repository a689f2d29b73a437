"""Tell the kernel which images are read soon, so that it reads them into the page cache in the order of their offsets.

With `data.shuffle=blocks` these are whole windows of neighbors in storage: the reads are sequential although the order
of the images is shuffled. `engine.training.train` wraps the requests of a run in `read_ahead`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from itertools import zip_longest
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from engine.data.sampler import BatchRequest, Indices, Part
from engine.data.sources.encoded import EncodedSource

# The kernel reads no more of a range than the device's read-ahead (mm/readahead.c, force_page_cache_ra), by default
# 128 KiB.
MAX_ADVISED_BYTES = 128 << 10
# What lies between two ranges, such as a label in a tar archive, is read with them.
MAX_GAP_BYTES = 16 << 10
# Of the images that are prepared first, in one call.
FIRST_PIECE_IMAGES = 256
Piece = tuple[Part, Indices]


def advise_ranges(fd: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Advise the kernel to read ranges of a file (posix_fadvise(2), POSIX_FADV_WILLNEED). Raises OSError."""
    order = np.argsort(offsets)
    begins, ends = offsets[order], (offsets + sizes)[order]
    is_first = np.append(True, begins[1:] - ends[:-1] > MAX_GAP_BYTES)
    firsts = np.flatnonzero(is_first)
    for begin, end in zip(begins[firsts].tolist(), np.maximum.reduceat(ends, firsts).tolist(), strict=True):
        for start in range(begin, end, MAX_ADVISED_BYTES):
            os.posix_fadvise(fd, start, min(MAX_ADVISED_BYTES, end - start), os.POSIX_FADV_WILLNEED)


def read_ahead(requests: Iterable[BatchRequest], source: EncodedSource, num_images: int) -> Generator[BatchRequest]:
    """Yield the requests unchanged, while a thread prepares the images of those up to `2 * num_images` images later.

    The images of `num_images` images of requests are prepared in the order in which they are stored, at the pace of the
    requests before them. The thread starts with the first request, after DataLoader workers are forked.
    """
    queue: SimpleQueue[Piece | None] = SimpleQueue()
    Thread(target=_prepare, args=(source, queue), name="read-ahead", daemon=True).start()
    groups = _groups(requests, num_images)
    try:
        current = next(groups, [])
        for piece in _pieces(current, source, sum(len(request.indices) for request in current) // FIRST_PIECE_IMAGES):
            queue.put(piece)
        while current:
            following = next(groups, [])
            for request, piece in zip_longest(current, _pieces(following, source, len(current))):
                if piece is not None:
                    queue.put(piece)
                yield request
            current = following
    finally:
        queue.put(None)


def _prepare(source: EncodedSource, queue: SimpleQueue[Piece | None]) -> None:
    while (piece := queue.get()) is not None:
        source.prepare(*piece)


def _groups(requests: Iterable[BatchRequest], num_images: int) -> Iterator[list[BatchRequest]]:
    """Yield consecutive requests of one part with about `num_images` images."""
    group: list[BatchRequest] = []
    images = 0
    for request in requests:
        if group and (images >= num_images or request.part != group[0].part):
            yield group
            group, images = [], 0
        group.append(request)
        images += len(request.indices)
    if group:
        yield group


def _pieces(group: list[BatchRequest], source: EncodedSource, count: int) -> list[Piece]:
    """Return the images of a group in the order in which they are stored, in at most `count` pieces."""
    if not group:
        return []
    part = group[0].part
    indices = source.in_storage_order(part, np.concatenate([request.indices for request in group]))
    return [(part, piece) for piece in np.array_split(indices, max(count, 1)) if len(piece)]

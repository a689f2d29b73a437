"""Check every byte of a packed set. Called by `gputrain data verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.data.pack.pack_file import HEADER_BYTES, InvalidPackError, Pack
from engine.data.sources.base import UnreadableImageError
from engine.utils.host import available_cores

# Reading the disk is the limit, and CRC-32 takes 2 GiB/s per thread.
MAX_THREADS = 4
BATCH_IMAGES = 256


def damaged_images(
    pack: Pack, on_progress: Callable[[int], None], should_stop: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield a sentence for each image of an open packed set whose content is damaged, in the order of the file.

    The index is verified when the file is opened. `on_progress` is called with the number of images that were checked.
    Raises InvalidPackError if images overlap, or if bytes between them belong to none.
    """

    def check(row: int) -> str | None:
        try:
            pack.read(row)
        except UnreadableImageError as error:
            return str(error)
        return None

    order = np.argsort(pack.offsets, kind="stable")
    starts = pack.offsets[order]
    ends = starts + pack.sizes[order]
    if starts[0] != HEADER_BYTES or ends[-1] != pack.index_offset or np.any(starts[1:] != ends[:-1]):
        raise InvalidPackError("is damaged: its images overlap or leave a gap", code="damaged")
    with ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool:
        for start in range(0, len(order), BATCH_IMAGES):
            rows = order[start : start + BATCH_IMAGES].tolist()
            yield from (problem for problem in pool.map(check, rows) if problem is not None)
            on_progress(start + len(rows))
            if should_stop():
                return

"""The paths of the images of a folder, in one buffer instead of a string each.

`engine.data.sources.folder` fills it. A million strings take 100 MB, and a process that reads them copies their memory
pages, because it counts references.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

# Paths that are strings at the same time during an iteration.
CHUNK_PATHS = 1 << 12
Rows = NDArray[np.uint32] | range


class PathList(Sequence[str]):
    """Paths in a buffer, each followed by a null byte. `rows` are the positions of these paths in it."""

    def __init__(self, encoded: bytes, ends: NDArray[np.unsignedinteger], rows: Rows) -> None:
        self._encoded, self._ends, self._rows = encoded, ends, rows

    @classmethod
    def of_buffer(cls, encoded: bytes) -> PathList:
        """Return all paths of a buffer that `encode_paths` made."""
        kind = np.uint32 if len(encoded) < 1 << 32 else np.uint64
        ends = np.flatnonzero(np.frombuffer(encoded, np.uint8) == 0) + 1
        return cls(encoded, ends.astype(kind), range(len(ends)))

    def select(self, indices: NDArray[np.int64]) -> PathList:
        """Return the paths at ascending `indices` of this list, from the same buffer."""
        return PathList(self._encoded, self._ends, np.asarray(self._rows, np.uint32)[indices])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> PathList: ...
    def __getitem__(self, index: int | slice) -> str | PathList:
        if isinstance(index, slice):
            return PathList(self._encoded, self._ends, self._rows[index])
        row = int(self._rows[index])
        return os.fsdecode(self._encoded[self._start(row) : int(self._ends[row]) - 1])

    def __iter__(self) -> Iterator[str]:
        for position in range(0, len(self), CHUNK_PATHS):
            rows = np.asarray(self._rows[position : position + CHUNK_PATHS]).tolist()
            first, last = min(rows), max(rows)
            paths = os.fsdecode(self._encoded[self._start(first) : int(self._ends[last]) - 1]).split("\0")
            yield from (paths[row - first] for row in rows)

    def _start(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0


def encode_paths(paths: Iterable[str]) -> bytes:
    """Return the beginning of a buffer, or more of it: each path and a null byte, which no path contains."""
    return b"".join(os.fsencode(path) + b"\0" for path in paths)

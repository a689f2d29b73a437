"""Open files of the shards that `engine.data.sources.webdataset` reads."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from engine.data.sources.tar_headers import ShardError
from engine.data.sources.tar_index import ShardStamp, open_shard
from engine.data.sources.tar_index_cache import IndexedShard

MAX_OPEN_SHARDS = 256
CHANGED = "has changed since it was indexed; start the run again"


class _Descriptor:
    """An open shard, closed when nobody uses it anymore."""

    def __init__(self, shard: IndexedShard) -> None:
        self._shard = shard
        self.fd = open_shard(shard.path)
        weakref.finalize(self, os.close, self.fd)
        if not self.is_unchanged():
            raise ShardError(CHANGED, code="data-changed")

    def is_unchanged(self) -> bool:
        # The inode differs between mounts of some network file systems.
        stamp = ShardStamp.of(self.fd)
        return (stamp.size, stamp.mtime_ns) == (self._shard.stamp.size, self._shard.stamp.mtime_ns)


class DescriptorCache:
    """Descriptors of open shards, for any number of threads. It is not pickled.

    Without a lock, which a thread might hold while the process forks.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Descriptor] = {}

    def get(self, shard: IndexedShard) -> _Descriptor:
        """Open a shard, or return its open descriptor. Raises ShardError and OSError."""
        if (file := self._open.get(shard.path)) is not None:
            return file
        file = self._open.setdefault(shard.path, _Descriptor(shard))
        if len(self._open) > MAX_OPEN_SHARDS:
            # A thread that reads from it holds a reference, so it stays open until that read has ended. Another thread
            # may have removed it, or change the dictionary now.
            with suppress(StopIteration, KeyError, RuntimeError):
                del self._open[next(iter(self._open))]
        return file

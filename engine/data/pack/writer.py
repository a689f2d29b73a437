"""Pack an image folder into one file. Called by `gputrain data pack`.

The file is a function of the image files and the options, for any number of workers and interruptions. Threads read and
re-encode ahead, because Pillow releases the GIL; one of them writes in order (`engine.data.pack.partial`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.data.pack.pack_file import (
    HEADER_BYTES,
    ROW_BYTES,
    VERSION,
    PackInfo,
    encode_name,
    storage_order,
    write_index,
)
from engine.data.pack.partial import SYNC_BYTES, PartialPack
from engine.data.pack.reencode import Encoding, describe_encoding, reencode
from engine.data.sampler import PARTS
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.folder import ALLOW_EMPTY, FolderScan, OnProgress, scan_folder
from engine.data.sources.image import named_image
from engine.data.sources.image_file import read_image_file
from engine.utils.errors import Problem, UsageError
from engine.utils.host import available_cores
from engine.utils.output_file import check_output
from engine.utils.threads import CancellingPool, map_ahead

# Images that are re-encoded ahead of the one that is written, per worker. They are in memory.
AHEAD_PER_WORKER = 4
SAMPLE_IMAGES = 200


@dataclass(frozen=True)
class PackRequest:
    """What to pack. Without `encoding`, image files are packed as they are."""

    folder: Path
    output: Path
    encoding: Encoding | None = None
    workers: int | None = None
    allow_empty: bool = False
    force: bool = False
    sync_bytes: int = SYNC_BYTES

    @property
    def num_workers(self) -> int:
        return self.workers or available_cores()


@dataclass(frozen=True)
class PackProgress:
    """Images written so far, and the expected size of the file from their mean."""

    done: int
    total: int
    kept: int
    expected_bytes: int


@dataclass(frozen=True)
class PackSummary:
    """A finished packed set. `kept` images were written by an interrupted command before."""

    output: str
    images: dict[str, int]
    classes: int
    size_bytes: int
    source_bytes: int
    kept: int
    skipped: tuple[str, ...]


class PackStopped(Exception):  # noqa: N818 - a request, not an error
    """The command was asked to stop; `done` of `total` images are kept."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done:,} of {total:,} images are packed")
        self.done, self.total = done, total


class PackPlan:
    """The images of a folder in the order of rows, and `order`, their rows in the order of the file."""

    def __init__(self, request: PackRequest, scan: FolderScan) -> None:
        self.request, self.classes, self.skipped = request, scan.classes, scan.skipped
        self.warnings = [_without_keys(warning) for warning in scan.warnings]
        if "test" in scan.paths:
            self.skipped += ("the test images (a packed set has training and validation images only)",)
        parts = [part for part in PARTS if part in scan.paths]
        self.names = [name for part in parts for name in scan.paths[part]]
        self.labels = np.concatenate([scan.labels[part] for part in parts])
        self.sizes = np.concatenate([scan.sizes[part] for part in parts])
        self._mtimes_ns = np.concatenate([scan.mtimes_ns[part] for part in parts])
        self.order: list[int] = []
        for part in parts:
            first = len(self.order)
            self.order += [first + row for row in storage_order(scan.paths[part])]
        self.num_train = len(scan.paths["train"])

    @property
    def num_val(self) -> int:
        return len(self.names) - self.num_train

    def index_bytes(self) -> int:
        """Return about the size of header, index and names."""
        return HEADER_BYTES + ROW_BYTES * len(self.names) + sum(map(len, self.names))

    def stamp(self, row: int) -> bytes:
        """Return a digest that changes with the file of a row."""
        stamp = b"%s\0%d\0%d" % (encode_name(self.names[row]), self.sizes[row], self._mtimes_ns[row])
        return blake2b(stamp, digest_size=8).digest()

    def content(self, row: int) -> bytes:
        """Return what the packed set has of an image. Raises UnreadableImageError, UsageError if the file changed."""
        path = self.request.folder / self.names[row]
        with named_image(str(path)):
            data = read_image_file(path)
            status = path.stat()
        if (status.st_size, status.st_mtime_ns, len(data)) != (self.sizes[row], self._mtimes_ns[row], self.sizes[row]):
            raise UsageError.one(
                str(path),
                "changed while it was packed",
                "run the same command again, which continues",
                code="data-changed",
            )
        if self.request.encoding is None:
            return data
        with named_image(str(path)):
            return reencode(data, self.request.encoding)


def make_plan(request: PackRequest, on_progress: OnProgress = lambda _: None) -> PackPlan:
    """Scan the folder of a request. Raises UsageError, also if the output exists."""
    output = request.output
    # Now, because the scan of a large folder takes minutes.
    check_output(output, "photos.gpk", force=request.force)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        reason = f"nothing can be written to the folder {output.parent}"
        raise UsageError.one("--output", reason, "choose another one, or change its permissions", code="not-writable")
    try:
        scan = scan_folder(request.folder, allow_empty=request.allow_empty, on_progress=on_progress)
        return PackPlan(request, scan)
    except UsageError as error:
        raise UsageError([_without_keys(problem) for problem in error.problems]) from error


def expected_size(plan: PackPlan) -> int:
    """Return the expected size of a packed set, from a sample if images are re-encoded. Raises UsageError."""
    if plan.request.encoding is None:
        return plan.index_bytes() + int(plan.sizes.sum())
    # The stored order is random.
    sample = plan.order[:SAMPLE_IMAGES]
    with ThreadPoolExecutor(plan.request.num_workers) as pool, _reported(plan.request):
        sizes = list(pool.map(lambda row: len(plan.content(row)), sample))
    return plan.index_bytes() + round(sum(sizes) / len(sizes) * len(plan.names))


def write_pack(
    plan: PackPlan,
    on_progress: Callable[[PackProgress], None],
    notify: Callable[[Problem], object],
    should_stop: Callable[[], bool] = lambda: False,
) -> PackSummary:
    """Pack a folder, or continue to pack it. `notify` is called with a problem if images are packed again.

    Raises UsageError, and PackStopped when `should_stop` returns true.
    """
    request = plan.request
    options = {"format": VERSION, "encoding": describe_encoding(request.encoding)}
    with _reported(request):
        partial = PartialPack(request.output, options, request.sync_bytes)
        try:
            kept = _write_images(partial, plan, on_progress, notify, should_stop)
            size_bytes = _write_index(partial, plan)
            partial.finish()
        finally:
            partial.close()
    images = {"train": plan.num_train, "val": plan.num_val}
    source_bytes = int(plan.sizes.sum())
    return PackSummary(str(request.output), images, len(plan.classes), size_bytes, source_bytes, kept, plan.skipped)


def _without_keys(problem: Problem) -> Problem:
    """Return the problem of a folder with the command's arguments instead of config keys."""
    advice = problem.advice.replace(ALLOW_EMPTY, "--allow-empty").replace("data.path", "FOLDER")
    return replace(problem, location="FOLDER", advice=advice)


@contextmanager
def _reported(request: PackRequest) -> Iterator[None]:
    """Raise what can go wrong as a UsageError: an image that cannot be read, or an output that cannot be written."""
    try:
        yield
    except UnreadableImageError as error:
        advice = "repair or remove it, and run the same command again, which continues"
        raise UsageError.one("FOLDER", str(error), advice, code=error.code) from error
    except OSError as error:
        reason = f"{request.output} cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free disk space, and run the same command again, which continues"
            raise UsageError.one("--output", reason, advice, code="disk-full") from error
        if error.errno == errno.EFBIG:
            advice = "raise the limit of the shell (ulimit -f) or use another disk, and run the same command again"
            raise UsageError.one("--output", reason, advice, code="too-large") from error
        raise UsageError.one("--output", reason, "choose another output file", code="not-writable") from error


def _write_images(
    partial: PartialPack,
    plan: PackPlan,
    on_progress: Callable[[PackProgress], None],
    notify: Callable[[Problem], object],
    should_stop: Callable[[], bool],
) -> int:
    """Write the images that are still missing, and return how many were kept."""
    request, stamps = plan.request, [plan.stamp(row) for row in plan.order]
    kept = partial.begin(stamps)
    if partial.restart is not None:
        notify(partial.restart)
    total, index_bytes, source_bytes = len(plan.order), plan.index_bytes(), int(plan.sizes.sum())
    written = sum(record.size for record in partial.records)

    def report(done: int) -> None:
        contents = source_bytes if request.encoding is None else round(written / max(done, 1) * total)
        on_progress(PackProgress(done, total, kept, index_bytes + contents))

    report(kept)
    try:
        with CancellingPool(request.num_workers) as pool:
            contents = map_ahead(pool, plan.content, plan.order[kept:], AHEAD_PER_WORKER * request.num_workers)
            for done, content in enumerate(contents, kept + 1):
                partial.append(stamps[done - 1], content)
                written += len(content)
                report(done)
                if done < total and should_stop():
                    raise PackStopped(done, total)
    finally:
        if len(partial.records) < total:
            # After an error, too.
            with suppress(OSError):
                partial.keep()
    return kept


def _write_index(partial: PartialPack, plan: PackPlan) -> int:
    """Write index and header behind the images, and return the size of the file."""
    count = len(plan.order)
    order = np.array(plan.order, np.int64)
    stored_sizes = np.array([record.size for record in partial.records], np.uint64)
    stored_checksums = np.array([record.checksum for record in partial.records], np.uint32)
    offsets, sizes, checksums = np.empty(count, np.uint64), np.empty(count, np.uint32), np.empty(count, np.uint32)
    offsets[order] = HEADER_BYTES + np.cumsum(stored_sizes) - stored_sizes
    sizes[order], checksums[order] = stored_sizes.astype(np.uint32), stored_checksums
    return write_index(
        partial.fd,
        num_train=plan.num_train,
        num_val=plan.num_val,
        offsets=offsets,
        sizes=sizes,
        checksums=checksums,
        labels=plan.labels.astype(np.uint32),
        names=plan.names,
        info=PackInfo(classes=plan.classes, encoding=plan.request.encoding),
    )

"""Reduced curves that were read before: in memory, and for long journals in the user's cache folder.

`tui.pollers.compare` fills it. A file holds the curves of one journal of a certain size and time, else it is ignored.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np

from engine.runs.curves import BestEpoch, StepAxes
from engine.runs.metrics import METRIC_PREFIX, METRICS
from engine.runs.reduced_curves import STEP_CURVES, BlockSeries, RunCurves
from engine.runs.series import FloatArray, Series
from engine.utils.codec import (
    ENTRIES,
    Count,
    FileNumber,
    FileRecord,
    Integer,
    InvalidRecordError,
    Meta,
    decode,
    encode,
)
from engine.utils.files import (
    FileStamp,
    cache_folder,
    find_file_stamp,
    make_user_folder,
    read_bytes,
    replace_file,
    user_path_problem,
)

FOLDER = "curves"
# Shorter journals are read as fast as a file of the cache.
MIN_JOURNAL_BYTES = 1 << 19
MAX_CURVES_IN_MEMORY = 64
# A file has 0.3 MB; that of a run of thousands of epochs up to 4 MB.
MAX_FILES, MAX_TOTAL_BYTES, MAX_FILE_BYTES = 128, 1 << 26, 1 << 22


class CurvesHeader(FileRecord, frozen=True, kw_only=True):
    """The first line of a file: the stamp of the journal, the lengths of the arrays by name, and their checksum."""

    stamp: tuple[FileNumber, Count, Integer]
    arrays: Annotated[dict[str, Count], ENTRIES]
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]
    steps_per_epoch: Count
    last_step: Count
    nonfinite_count: Count
    best: BestEpoch | None


class CurveCache:
    """Curves by journal. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curves: dict[Path, tuple[FileStamp, RunCurves]] = {}

    def recall(self, journal: Path) -> RunCurves | None:
        """Return the curves in memory, without reading a file. The journal may have grown since."""
        with self._lock:
            known = self._curves.get(journal)
        stamp = find_file_stamp(journal) if known is not None else None
        if known is None or stamp is None or stamp[0] != known[0][0] or stamp[1] < known[0][1]:
            return None
        return known[1]

    def load(self, journal: Path, stamp: FileStamp) -> RunCurves | None:
        """Return the curves of a journal with this stamp, from memory or from a file."""
        with self._lock:
            known = self._curves.get(journal)
        if known is not None and known[0] == stamp:
            return known[1]
        curves = _read_file(journal, stamp) if stamp[1] >= MIN_JOURNAL_BYTES else None
        if curves is not None:
            self._remember(journal, stamp, curves)
        return curves

    def store(self, journal: Path, stamp: FileStamp, curves: RunCurves, *, to_disk: bool) -> None:
        """Keep curves in memory, and with `to_disk` in a file if the journal is long."""
        self._remember(journal, stamp, curves)
        if to_disk and stamp[1] >= MIN_JOURNAL_BYTES:
            # Without a cache the journal is read again the next time.
            with suppress(OSError):
                _write_file(journal, stamp, curves)

    def _remember(self, journal: Path, stamp: FileStamp, curves: RunCurves) -> None:
        with self._lock:
            self._curves.pop(journal, None)
            self._curves[journal] = (stamp, curves)
            while len(self._curves) > MAX_CURVES_IN_MEMORY:
                del self._curves[next(iter(self._curves))]


def _file_name(journal: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(journal))).hexdigest()[:32]


def _write_file(journal: Path, stamp: FileStamp, curves: RunCurves) -> None:
    """Write a line of JSON, then the arrays. Raises OSError."""
    folder, data = make_user_folder(cache_folder(), FOLDER), encode_curves(stamp, curves)
    if len(data) > MAX_FILE_BYTES:
        return
    replace_file(folder / _file_name(journal), lambda file: file.write(data))
    _remove_oldest(folder)


def _remove_oldest(folder: Path) -> None:
    """Keep the files that were used last, within the limits. Raises OSError."""
    entries = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            entries.append((status.st_mtime_ns, status.st_size, entry.path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(entries, reverse=True), 1):
        total += size
        if number > MAX_FILES or total > MAX_TOTAL_BYTES:
            Path(path).unlink(missing_ok=True)


def _read_file(journal: Path, stamp: FileStamp) -> RunCurves | None:
    name = f"{FOLDER}/{_file_name(journal)}"
    path = cache_folder() / name
    try:
        if user_path_problem(cache_folder(), name) is not None:
            return None
        curves = decode_curves(read_bytes(path, MAX_FILE_BYTES), stamp)
        if curves is not None:
            os.utime(path)
    except OSError:
        return None
    return curves


def encode_curves(stamp: FileStamp, curves: RunCurves) -> bytes:
    """Return the content of a file: a line of JSON with names, lengths and checksum of the arrays, and the arrays as
    64-bit floats."""
    arrays: dict[str, FloatArray] = {}
    named = {"times": curves.axes.times, "sessions": curves.axes.sessions}
    for metric, block in curves.metrics.items():
        named[metric] = block.points
        if block.is_reduced:
            named[f"means {metric}"] = block.means
    for name, series in named.items():
        arrays[f"x {name}"], arrays[f"y {name}"] = series.x, series.y
    body = b"".join(array.astype("<f8").tobytes() for array in arrays.values())
    header = CurvesHeader(
        stamp=stamp,
        arrays={name: len(array) for name, array in arrays.items()},
        crc32=zlib.crc32(body),
        steps_per_epoch=curves.axes.steps_per_epoch,
        last_step=curves.last_step,
        nonfinite_count=curves.nonfinite_count,
        best=curves.best,
    )
    return encode(header) + b"\n" + body


def decode_curves(data: bytes, stamp: FileStamp) -> RunCurves | None:
    """Return the curves in a file; None if it is damaged, of another format, or of another state of the journal."""
    line, _, body = data.partition(b"\n")
    try:
        header = decode(line, CurvesHeader)
        if header.stamp != stamp or zlib.crc32(body) != header.crc32:
            return None
        return _curves_of(header, _arrays(header.arrays, body))
    except (InvalidRecordError, KeyError, ValueError):
        return None


def _arrays(lengths: Mapping[str, int], body: bytes) -> dict[str, FloatArray]:
    """Split the arrays. Raises ValueError."""
    values = np.frombuffer(body, "<f8").astype(np.float64)
    if sum(lengths.values()) != len(values):
        raise ValueError("the arrays have other lengths")
    parts = np.split(values, np.cumsum(list(lengths.values()))[:-1])
    return dict(zip(lengths, parts, strict=True))


def _curves_of(header: CurvesHeader, arrays: Mapping[str, FloatArray]) -> RunCurves:
    """Return the curves. Raises KeyError or ValueError."""

    def series(name: str) -> Series:
        x, y = arrays[f"x {name}"], arrays[f"y {name}"]
        if len(x) != len(y):
            raise ValueError("x and y differ in length")
        return Series(x, y)

    keys = [*STEP_CURVES, *(key for key, metric in METRICS.items() if metric.epoch is not None)]
    keys += [name[2:] for name in arrays if name.startswith(f"x {METRIC_PREFIX}")]
    metrics = {}
    for key in dict.fromkeys(keys):
        points = series(key)
        metrics[key] = BlockSeries(points, series(f"means {key}") if f"x means {key}" in arrays else points)
    axes = StepAxes(header.steps_per_epoch, series("times"), series("sessions"))
    return RunCurves(metrics, axes, header.last_step, header.nonfinite_count, header.best)

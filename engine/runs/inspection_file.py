"""Read and write `RUN/inspection.npz`, see `engine.runs.inspection`.

The file is a ZIP archive of arrays, as `numpy.savez` writes it. Another user may have written it, so it is read without
pickle, and sizes, types and shapes are checked before memory is allocated.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from engine.runs.folder import RunFolder
from engine.runs.inspection import MAX_IMAGES, PART_NAMES, Inspection, InspectionInfo
from engine.utils.codec import InvalidRecordError, decode, encode
from engine.utils.files import open_regular_file, replace_file

MAX_INSPECTION_BYTES = 1 << 29
MAX_INFO_BYTES = 1 << 23
# `numpy.savez` writes 1 KB for all names. zipfile takes ten times the memory of the entries that others add.
MAX_DIRECTORY_BYTES = 1 << 16
MAX_PATH_BYTES = 4096  # PATH_MAX of Linux
MAX_THUMBNAIL_SIDE = 64
# All of MNIST's 10,000 validation images, or 5,461 color images of 32 x 32 pixels.
MAX_THUMBNAIL_BYTES = 1 << 24

_COLUMNS: Mapping[str, str] = {
    "part": "|u1",
    "index": "<i8",
    "label": "<i4",
    "predicted": "<i4",
    "second": "<i4",
    "probability": "<f4",
    "label_probability": "<f4",
    "loss": "<f4",
    "margin": "<f4",
}
_DTYPES: Mapping[str, str] = {**_COLUMNS, "info": "|u1", "paths": "|u1", "thumbnail_rows": "<i8", "thumbnails": "|u1"}


class PathTable(Sequence[str]):
    """The paths of all images, decoded when they are read: a list of strings would take three times the memory."""

    def __init__(self, joined: bytes) -> None:
        self._joined = joined
        ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == 0)
        self._starts, self._ends = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends, ends

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def longest(self) -> int:
        """Length of the longest path in bytes."""
        return int((self._ends - self._starts).max(initial=0))

    def __getitem__(self, row: Any) -> Any:
        return os.fsdecode(self._joined[self._starts[row] : self._ends[row]])


def write_inspection(run: RunFolder, inspection: Inspection) -> None:
    """Replace the inspection of a run atomically. Raises OSError."""
    arrays: dict[str, NDArray[Any]] = {name: getattr(inspection, name) for name in _COLUMNS}
    arrays |= {"thumbnail_rows": inspection.thumbnail_rows, "thumbnails": inspection.thumbnails}
    arrays["info"] = _to_bytes(encode(inspection.info))
    if inspection.paths is not None:
        # No path contains a null byte.
        arrays["paths"] = _to_bytes(b"".join(os.fsencode(path) + b"\0" for path in inspection.paths))
    converted = {name: np.ascontiguousarray(array, _DTYPES[name]) for name, array in arrays.items()}
    replace_file(run.inspection, lambda file: np.savez_compressed(file, allow_pickle=False, **converted))


def _to_bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def read_inspection(run: RunFolder) -> Inspection | None:
    """Return the inspection of a run, None if it has none. Raises InvalidRecordError."""
    try:
        with open_regular_file(run.inspection, MAX_INSPECTION_BYTES) as file:
            arrays = _read_arrays(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRecordError(f"cannot be read: {error.strerror or error}", code="not-readable") from error
    # zipfile and numpy raise many kinds of errors for damaged files.
    except (BadZipFile, ValueError, TypeError, EOFError, LookupError, RuntimeError, zlib.error) as error:
        raise InvalidRecordError(f"is damaged: {error}", code="damaged") from error
    info = decode(arrays.pop("info").tobytes(), InspectionInfo)
    paths = arrays.pop("paths", None)
    table = None if paths is None else PathTable(paths.tobytes())
    if table is not None and table.longest > MAX_PATH_BYTES:
        raise InvalidRecordError(f"is damaged: a path has more than {MAX_PATH_BYTES} bytes", code="damaged")
    inspection = Inspection(info, **arrays, paths=table)
    if problem := _problem(inspection):
        raise InvalidRecordError(f"is damaged: {problem}", code="damaged")
    return inspection


def _read_arrays(file: BinaryIO) -> dict[str, Any]:
    """Return the arrays of an open file. Raises ValueError for unknown types, and the errors of zipfile."""
    arrays: dict[str, Any] = {}
    _check_directory(file)
    with ZipFile(file) as archive:
        members = {name: archive.getinfo(f"{name}.npy") for name in _DTYPES if name != "paths"}
        if "paths.npy" in archive.namelist():
            members["paths"] = archive.getinfo("paths.npy")
        if sum(member.file_size for member in members.values()) > MAX_INSPECTION_BYTES:
            raise ValueError(f"its arrays take more than {MAX_INSPECTION_BYTES >> 20} MiB")
        for name, member in members.items():
            # Others need a dictionary as large as the file says.
            if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise ValueError("an array is compressed in another way than numpy does")
            if name == "info" and member.file_size > MAX_INFO_BYTES:
                raise ValueError(f"its description takes more than {MAX_INFO_BYTES >> 20} MiB")
            with archive.open(member) as stream:
                # zipfile reads no more bytes than `file_size`, even if the compressed data has more.
                arrays[name] = _parse_array(stream.read(), _DTYPES[name])
    return arrays


def _check_directory(file: BinaryIO) -> None:
    """Raise ValueError unless an archive ends with a short directory, see APPNOTE.TXT 4.3.16 of PKWARE."""
    file.seek(max(os.fstat(file.fileno()).st_size - 42, 0))
    end = file.read(42)
    has_zip64_locator = end[:4] == b"PK\x06\x07"
    if end[-22:-18] != b"PK\x05\x06" or end[-2:] != b"\0\0" or has_zip64_locator:
        raise ValueError("it is truncated, or no archive of numpy.savez")
    if int.from_bytes(end[-10:-6], "little") > MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory takes more than {MAX_DIRECTORY_BYTES >> 10} KiB")


def _parse_array(data: bytes, dtype: str) -> NDArray[Any]:
    """Return the array of a `.npy` file of this type, without a copy."""
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    if version != (1, 0):
        raise ValueError("an array has an unknown version")
    try:
        shape, fortran_order, found = npy.read_array_header_1_0(stream)
    except Exception as error:
        # Its parser also raises TypeError, MemoryError and tokenize.TokenError.
        raise ValueError("an array has an invalid header") from error
    if found != np.dtype(dtype) or fortran_order:
        raise ValueError(f"an array has the type {found} instead of {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * found.itemsize != len(data) - stream.tell():
        raise ValueError("an array is truncated")
    return np.frombuffer(data, found, offset=stream.tell()).reshape(shape)


def _problem(inspection: Inspection) -> str | None:
    """Return which array does not fit the others; None if all do."""
    count, thumbnails, rows = inspection.label.size, inspection.thumbnails, inspection.thumbnail_rows
    if count > MAX_IMAGES or any(getattr(inspection, name).shape != (count,) for name in _COLUMNS):
        return "its columns differ in length"
    num_classes = len(inspection.info.classes)
    limits = {
        "part": len(PART_NAMES),
        "label": num_classes,
        "predicted": num_classes,
        "second": num_classes,
        "index": np.inf,
    }
    for name, limit in limits.items():
        column = getattr(inspection, name)
        if count and not (column.min() >= 0 and column.max() < limit):
            return f"the column {name} is out of range"
    if inspection.paths is not None and len(inspection.paths) != count:
        return "its number of paths differs from the number of images"
    if thumbnails.ndim != 4 or thumbnails.shape[3] not in (1, 3) or max(thumbnails.shape[1:3]) > MAX_THUMBNAIL_SIDE:
        return "its thumbnails have a wrong shape"
    if rows.shape != (len(thumbnails),) or 0 in thumbnails.shape[1:3]:
        return "its thumbnails belong to no images"
    # In ascending order.
    is_valid = not len(rows) or ((np.diff(rows) > 0).all() and rows[0] >= 0 and rows[-1] < count)
    return None if is_valid else "its thumbnails belong to no images"

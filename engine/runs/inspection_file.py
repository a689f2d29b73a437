"""Read and write `RUN/inspection.npz`, see `engine.runs.inspection`.

The file is a ZIP archive of arrays, as `numpy.savez` writes it. Another user may have written it, so it is read without
pickle, and its size, types and indices are checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from engine.runs.folder import RunFolder
from engine.runs.inspection import COLUMNS, MAX_IMAGES, PART_NAMES, Inspection, InspectionInfo
from engine.utils.codec import InvalidRecordError, decode, encode
from engine.utils.files import open_regular_file, replace_file

MAX_INSPECTION_BYTES = 1 << 29
MAX_THUMBNAIL_SIDE = 64
# All of MNIST's 10,000 validation images, or 5,461 color images of 32 x 32 pixels.
MAX_THUMBNAIL_BYTES = 1 << 24

_DTYPES: Mapping[str, str] = {**COLUMNS, "info": "|u1", "paths": "|u1", "thumbnail_rows": "<i8", "thumbnails": "|u1"}


def write_inspection(run: RunFolder, inspection: Inspection) -> None:
    """Replace the inspection of a run atomically. Raises OSError."""
    arrays: dict[str, NDArray[Any]] = dict(inspection.columns)
    arrays |= {"thumbnail_rows": inspection.thumbnail_rows, "thumbnails": inspection.thumbnails}
    arrays["info"] = np.frombuffer(encode(inspection.info), np.uint8)
    if inspection.paths is not None:
        # No path contains a null byte.
        arrays["paths"] = np.frombuffer(b"".join(os.fsencode(path) + b"\0" for path in inspection.paths), np.uint8)
    converted = {name: np.ascontiguousarray(array, _DTYPES[name]) for name, array in arrays.items()}
    replace_file(run.inspection, lambda file: np.savez_compressed(file, allow_pickle=False, **converted))


def read_inspection(run: RunFolder) -> Inspection | None:
    """Return the inspection of a run, None if it has none. Raises InvalidRecordError."""
    try:
        with open_regular_file(run.inspection, MAX_INSPECTION_BYTES) as file:
            # zipfile reads no more bytes of a member than `file_size`, even if the compressed data has more.
            if sum(member.file_size for member in ZipFile(file).infolist()) > MAX_INSPECTION_BYTES:
                raise ValueError(f"its arrays take more than {MAX_INSPECTION_BYTES >> 20} MiB")
            archive = NpzFile(file, allow_pickle=False)
            arrays = {name: archive[name] for name in _DTYPES if name != "paths" or name in archive.files}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRecordError(f"cannot be read: {error.strerror or error}", code="not-readable") from error
    except Exception as error:
        # zipfile and NumPy raise many kinds of errors for a damaged file.
        raise InvalidRecordError(f"is damaged: {error}", code="damaged") from error
    info = decode(arrays.pop("info").tobytes(), InspectionInfo)
    joined = arrays.pop("paths", None)
    paths = None if joined is None else [os.fsdecode(path) for path in joined.tobytes().split(b"\0")[:-1]]
    columns = {name: arrays.pop(name) for name in COLUMNS}
    inspection = Inspection(info, columns, paths, **arrays)
    if not _fits(inspection):
        raise InvalidRecordError("is damaged: its arrays do not fit each other", code="damaged")
    return inspection


def _fits(inspection: Inspection) -> bool:
    """Whether all arrays have the right types and lengths, and indices that exist."""
    columns, pictures, rows = inspection.columns, inspection.thumbnails, inspection.thumbnail_rows
    count, num_classes = columns["label"].size, len(inspection.info.classes)
    limits = {"part": len(PART_NAMES), "label": num_classes, "predicted": num_classes, "second": num_classes}
    return (
        count <= MAX_IMAGES
        and all(column.shape == (count,) and column.dtype == COLUMNS[name] for name, column in columns.items())
        and all(_is_below(columns[name], limit) for name, limit in limits.items())
        and (inspection.paths is None or len(inspection.paths) == count)
        and pictures.ndim == 4
        and pictures.dtype == np.uint8
        and pictures.shape[3] in (1, 3)
        and 0 < min(pictures.shape[1:3]) <= max(pictures.shape[1:3]) <= MAX_THUMBNAIL_SIDE
        and rows.shape == (len(pictures),)
        and _is_below(rows, count)
    )


def _is_below(indices: NDArray[Any], limit: int) -> bool:
    return not indices.size or bool(indices.min() >= 0 and indices.max() < limit)

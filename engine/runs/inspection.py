"""What a model makes of each single image: the rows of `RUN/inspection.npz`, and the lists that rank them.

`engine.train.inference.inspect` evaluates the images, `engine.train.inference.preview` shows an image of a row.
`gputrain evaluate --list`, the screen and the report show the lists. The file is a ZIP archive of arrays, as
`numpy.savez` writes it. Another user may have written it, so it is read without pickle, and its size, types and indices
are checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from zipfile import ZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from engine.base.codec import ENTRIES, Count, FileRecord, Integer, InvalidRecordError, Meta, UnixTime, decode, encode
from engine.base.files import open_regular_file, replace_file
from engine.runs.folder import RunFolder

ListName = Literal["mistakes", "uncertain", "label-issues"]
LIST_NAMES: tuple[ListName, ...] = ("mistakes", "uncertain", "label-issues")
# In the order of their codes in the column `part`.
PART_NAMES = ("train", "val")
PartName = Literal["val", "train", "all"]
# The columns of the file, with their types in NumPy's notation.
COLUMNS: Mapping[str, str] = {
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
# Four times ImageNet's training images; they take 370 MB.
MAX_IMAGES = 5_000_000
MAX_UNREAD = 1000

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class InspectedImage:
    """Result of one image.

    `row` is its row in the inspection, `index` its index in the part. `path` is relative to the folder of the dataset,
    None for a dataset without image files. `label`, `predicted` and `second`, the second most probable class, are class
    indices. `probability` is that of the predicted class, and `margin` is `probability` minus that of the second class.
    `loss` is the loss of this image alone. Numbers are NaN if the weights of the model are not finite.
    """

    row: int
    part: str
    index: int
    path: str | None
    label: int
    predicted: int
    second: int
    probability: float
    label_probability: float
    loss: float
    margin: float

    @property
    def name(self) -> str:
        """The path, or for a dataset without image files the part and the index: `val 17`."""
        return self.path if self.path is not None else f"{self.part} {self.index}"


class InspectionInfo(FileRecord, frozen=True, kw_only=True):
    """What an inspection is of.

    `checkpoint` is the name of the file and `digest` its SHA-256, `epoch` the epoch at whose end it was saved, None if
    it was saved within one. `raw` means the raw weights, although there are EMA weights. `dataset`, `overrides` and
    `data`, the evaluated section of the config, describe the data; `seed` is that of its split. `root` is the folder of
    the image files, None for a dataset without any. `fingerprints` maps a part to the digests of
    `engine.train.data.sources.base`. `unread` names images that could not be read, at most MAX_UNREAD of
    `unread_count`.
    """

    checkpoint: str
    digest: str
    step: Count
    epoch: Count | None
    raw: bool
    part: PartName
    dataset: str
    classes: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1 << 24)]
    root: str | None = None
    overrides: Annotated[tuple[str, ...], ENTRIES] = ()
    data: Annotated[dict[str, Any], ENTRIES]
    seed: Integer = 0
    fingerprints: Annotated[dict[Literal["train", "val"], Annotated[dict[str, str], ENTRIES]], ENTRIES]
    unread: Annotated[tuple[str, ...], Meta(max_length=MAX_UNREAD)] = ()
    unread_count: Count = 0
    time: UnixTime = 0.0

    def covers(self, part: str) -> bool:
        """Whether the images of a part, or of "all", were evaluated."""
        return self.part in (part, "all")

    def stale_reason(self, epochs: Collection[int]) -> str | None:
        """Return why the inspection does not belong to the validation results of these epochs; None if it does.

        The reason is a clause that follows "the inspection".
        """
        if self.overrides:
            return f"is of other data ({' '.join(self.overrides)})"
        if not self.covers("val"):
            return "is of the training images"
        if self.epoch in epochs:
            return None
        place = f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"
        return f"is of {place}, not of epoch {' or '.join(map(str, sorted(set(epochs))))}"


@dataclass(frozen=True)
class Inspection:
    """Results of all images, and small pictures of some of them.

    `columns` has an array for each name in COLUMNS, with one element per image. `paths` is None for a dataset without
    image files. `thumbnails` has the pictures, N x H x W x C uint8 with one or three channels, of `thumbnail_rows`.
    """

    info: InspectionInfo
    columns: Mapping[str, NDArray[Any]]
    paths: Sequence[str] | None = None
    thumbnail_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    thumbnails: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 1, 1, 1), np.uint8))

    def __len__(self) -> int:
        return len(self.columns["label"])

    def count(self, part: PartName = "all") -> int:
        """Return the number of inspected images of a part."""
        return int(self._is_in(part).sum())

    def images(self, rows: Iterable[int]) -> list[InspectedImage]:
        """Return the results of some rows, such as those of `ranked`."""
        return [self.image(row) for row in rows]

    def image(self, row: int) -> InspectedImage:
        """Return the result of one row."""
        values = {name: column[row].item() for name, column in self.columns.items()}
        path = None if self.paths is None else self.paths[row]
        return InspectedImage(**values | {"row": int(row), "part": PART_NAMES[values["part"]], "path": path})

    def thumbnail(self, row: int) -> NDArray[np.uint8] | None:
        """Return the stored picture of a row, H x W x C; None if it has none."""
        found = np.flatnonzero(self.thumbnail_rows == row)
        return self.thumbnails[found[0]] if len(found) else None

    def cell(self, true: int, predicted: int, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the images of one cell of the confusion matrix, by descending loss."""
        columns = self.columns
        rows = np.flatnonzero(self._is_in(part) & (columns["label"] == true) & (columns["predicted"] == predicted))
        return rows[np.argsort(-columns["loss"][rows], kind="stable")[:limit]]

    def ranked(self, name: ListName, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the rows of a list, the most interesting first.

        `mistakes` are the images of another predicted class, by descending probability of that class. `uncertain` are
        all images, by ascending difference between the probabilities of their two most probable classes.
        `label-issues` are the images whose label the model contradicts, see `_label_issue_keys`.
        """
        columns = self.columns
        is_listed = self._is_in(part)
        if name != "uncertain":
            is_listed = is_listed & (columns["predicted"] != columns["label"])
        rows = np.flatnonzero(is_listed)
        match name:
            case "mistakes":
                keys = -columns["probability"]
            case "uncertain":
                keys = columns["margin"]
            case "label-issues":
                keys = self._label_issue_keys()
        return rows[np.argsort(keys[rows], kind="stable")[:limit]]

    def _label_issue_keys(self) -> NDArray[np.float64]:
        """Return a number for each image, which is lowest where the label is most likely to be wrong.

        Confident learning (Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
        JAIR 70, 2021): the threshold of a class is the mean probability of that class over the images with its label,
        here of the same part, because a model is surer of images that it has trained on. An image of another class
        whose probability reaches the threshold of that class is suspected. The order is that of the normalized margin,
        probability of the label minus that of the predicted class. Images below the threshold follow the others.
        """
        columns, num_classes = self.columns, len(self.info.classes)
        first_group, probability = columns["part"].astype(np.int64) * num_classes, columns["label_probability"]
        groups, num_groups = first_group + columns["label"], len(PART_NAMES) * num_classes
        sums = np.bincount(groups, probability, num_groups)
        thresholds = sums / np.maximum(np.bincount(groups, minlength=num_groups), 1)
        is_confident = columns["probability"] >= thresholds[first_group + columns["predicted"]]
        # Margins are between -1 and 1.
        margins: NDArray[np.float64] = probability - columns["probability"] + np.where(is_confident, 0.0, 3.0)
        return margins

    def _is_in(self, part: PartName) -> NDArray[np.bool_]:
        parts = PART_NAMES if part == "all" else (part,)
        return np.isin(self.columns["part"], [PART_NAMES.index(name) for name in parts])


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

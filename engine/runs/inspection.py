"""What a model makes of each single image: the rows of `RUN/inspection.npz`, and the lists that rank them.

`engine.inference.inspect` evaluates the images, `engine.runs.inspection_file` reads and writes the file,
`engine.inference.preview` shows an image of a row. `gputrain evaluate --list`, the screen and the report show the
lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.utils.codec import ENTRIES, Count, FileRecord, Integer, Meta, UnixTime

ListName = Literal["mistakes", "uncertain", "label-issues"]
LIST_NAMES: tuple[ListName, ...] = ("mistakes", "uncertain", "label-issues")
# In the order of their codes in the column `part`.
PART_NAMES = ("train", "val")
PartName = Literal["val", "train", "all"]
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
    `engine.data.fingerprint`. `unread` names images that could not be read, at most MAX_UNREAD of `unread_count`.
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
    """Results of all images, one array element per image, and small pictures of some of them.

    `paths` is None for a dataset without image files. `thumbnails` has the pictures, N x H x W x C uint8 with one or
    three channels, of the rows `thumbnail_rows`, which are sorted.
    """

    info: InspectionInfo
    part: NDArray[np.uint8]
    index: NDArray[np.int64]
    label: NDArray[np.int32]
    predicted: NDArray[np.int32]
    second: NDArray[np.int32]
    probability: NDArray[np.float32]
    label_probability: NDArray[np.float32]
    loss: NDArray[np.float32]
    margin: NDArray[np.float32]
    paths: Sequence[str] | None = None
    thumbnail_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    thumbnails: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 1, 1, 1), np.uint8))

    def __len__(self) -> int:
        return len(self.label)

    def count(self, part: PartName = "all") -> int:
        """Return the number of inspected images of a part."""
        return len(self) if part == "all" else int((self.part == PART_NAMES.index(part)).sum())

    def image(self, row: int) -> InspectedImage:
        """Return the result of one row."""
        return InspectedImage(
            row=int(row),
            part=PART_NAMES[self.part[row]],
            index=int(self.index[row]),
            path=None if self.paths is None else self.paths[row],
            label=int(self.label[row]),
            predicted=int(self.predicted[row]),
            second=int(self.second[row]),
            probability=float(self.probability[row]),
            label_probability=float(self.label_probability[row]),
            loss=float(self.loss[row]),
            margin=float(self.margin[row]),
        )

    def images(self, rows: Iterable[int]) -> list[InspectedImage]:
        """Return the results of some rows, such as those of `ranked`."""
        return [self.image(row) for row in rows]

    def thumbnail(self, row: int) -> NDArray[np.uint8] | None:
        """Return the stored picture of a row, H x W x C; None if it has none."""
        position = int(np.searchsorted(self.thumbnail_rows, row))
        found = position < len(self.thumbnail_rows) and self.thumbnail_rows[position] == row
        return self.thumbnails[position] if found else None

    def ranked(self, name: ListName, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the rows of a list by its name, the most interesting first."""
        rank = {"mistakes": self.confident_mistakes, "uncertain": self.uncertain, "label-issues": self.suspected_labels}
        return rank[name](part, limit)

    def cell(self, true: int, predicted: int, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the images of one cell of the confusion matrix, by descending loss."""
        rows = self._rows((self.label == true) & (self.predicted == predicted), part)
        return _sort(rows, -_finite(self.loss[rows], np.inf), limit)

    def confident_mistakes(self, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the images of another predicted class, by descending probability of that class."""
        rows = self._rows(self.predicted != self.label, part)
        return _sort(rows, -_finite(self.probability[rows], 1.0), limit)

    def uncertain(self, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return all images by ascending difference between the probabilities of their two most probable classes."""
        rows = self._rows(np.ones(len(self), bool), part)
        return _sort(rows, _finite(self.margin[rows], 0.0), limit)

    def suspected_labels(self, part: PartName = "all", limit: int | None = None) -> Rows:
        """Return the images whose label the model contradicts with confidence, the least likely label first.

        Confident learning (Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
        JAIR 70, 2021): the threshold of a class is the mean probability of that class over the images with its label,
        here of the same part, because a model is surer of images that it has trained on. An image of another class
        whose probability reaches the threshold of that class is suspected. The order is that of the normalized margin,
        probability of the label minus that of the predicted class. Images below the threshold follow the others.
        """
        rows = self._rows(self.predicted != self.label, part)
        thresholds = self._class_thresholds()[self.part[rows], self.predicted[rows]]
        is_confident = _finite(self.probability[rows], 1.0) >= thresholds
        margins = _finite(self.label_probability[rows] - self.probability[rows], -1.0)
        # Margins are between -1 and 1.
        return _sort(rows, margins + np.where(is_confident, 0.0, 3.0), limit)

    def _class_thresholds(self) -> NDArray[np.float64]:
        """Return the thresholds of `suspected_labels`, parts x classes; 0 for a class without images."""
        num_classes = len(self.info.classes)
        groups = self.part.astype(np.int64) * num_classes + self.label
        size = len(PART_NAMES) * num_classes
        sums = np.bincount(groups, _finite(self.label_probability, 0.0), size)
        return (sums / np.maximum(np.bincount(groups, minlength=size), 1)).reshape(len(PART_NAMES), num_classes)

    def _rows(self, mask: NDArray[np.bool_], part: PartName) -> Rows:
        if part != "all":
            mask = mask & (self.part == PART_NAMES.index(part))
        return np.flatnonzero(mask)


def _finite(values: NDArray[np.floating], substitute: float) -> NDArray[np.float64]:
    """Return the values with NaN, which has no place in an order, replaced."""
    return np.nan_to_num(values.astype(np.float64), nan=substitute, posinf=np.inf, neginf=-np.inf)


def _sort(rows: Rows, keys: NDArray[np.float64], limit: int | None) -> Rows:
    return rows[np.argsort(keys, kind="stable")[:limit]]

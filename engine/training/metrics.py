"""What is counted of images that a model has seen: loss, hits, and which class was taken for which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EVALUATION_FORMAT = 1
# The confusion matrix of more classes would be of no use to anyone, and fill the disk.
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Sums:
    """Of a part of the data, over all ranks: mean loss (NaN where no image counted), accuracy, and images that could
    not be read."""

    loss: float
    accuracy: float
    unread: int
    images: int = 0


@dataclass
class Totals:
    """A rank's running sums over images, on its device until they are asked for."""

    device: torch.device
    loss: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    """Images that were right, all that were taken, and those that could not be read."""

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._right, self._images, _ = self.counts

    def add(self, mean_loss: Tensor, right: Tensor, images: int, bad: Tensor | None = None) -> None:
        """A batch of so many images, of which `right` were right; `bad` says that it counts for nothing."""
        if bad is None:
            self._images.add_(images)
        else:
            mean_loss, right = torch.where(bad, 0.0, mean_loss), torch.where(bad, 0, right)
            self._images.add_(torch.where(bad, 0, images))
        # In float64, as what it is added to.
        self.loss.add_(mean_loss, alpha=images)
        self._right.add_(right)

    def over_ranks(self) -> Sums:
        """A collective."""
        loss, counts = self.loss.clone(), self.counts.clone()
        dist.all_reduce(loss)
        dist.all_reduce(counts)
        correct, images, unread = (int(value) for value in counts.tolist())
        if images == 0:
            return Sums(math.nan, 0.0, unread)
        return Sums(loss.item() / images, correct / images, unread, images)


class Tally:
    """What an evaluation counts of one model's answers, on its device until asked for."""

    def __init__(self, device: torch.device, classes: int) -> None:
        self.totals = Totals(device)
        self._classes = classes
        self._in_top5 = torch.zeros((), dtype=torch.int64, device=device)
        # How often each class was taken for each; of very many classes only how often for another, and for itself.
        self._whole = classes <= MOST_CLASSES
        self._width = classes if self._whole else 2
        self._pairs = torch.zeros(classes * self._width, dtype=torch.int64, device=device)

    def add(self, mean_loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        taken = logits.argmax(1)
        hits = taken == labels
        self.totals.add(mean_loss, hits.sum(), len(labels))
        best = logits.topk(min(5, self._classes), 1).indices
        # An image has one class, which comes among the best no more than once.
        self._in_top5 += (best == labels[:, None]).sum()
        places = labels * self._width + (taken if self._whole else hits)
        self._pairs.index_add_(0, places, torch.ones_like(places))

    def over_ranks(self) -> Evaluation:
        """A collective."""
        sums = self.totals.over_ranks()
        in_top5, pairs = self._in_top5.clone(), self._pairs.clone()
        dist.all_reduce(in_top5)
        dist.all_reduce(pairs)
        return self._evaluation(sums, in_top5, pairs)

    def alone(self) -> Evaluation:
        """Of this process, without any other."""
        right, images, unread = (int(value) for value in self.totals.counts.tolist())
        loss = self.totals.loss.item() / images if images else math.nan
        return self._evaluation(Sums(loss, right / max(images, 1), unread, images), self._in_top5, self._pairs)

    def _evaluation(self, sums: Sums, in_top5: Tensor, pairs: Tensor) -> Evaluation:
        table = pairs.view(self._classes, -1).cpu()
        own = table.diagonal() if self._whole else table[:, 1]
        of_class = table.sum(1)
        return Evaluation(
            sums,
            in_top5.item() / max(sums.images, 1),
            [right / of if of else None for right, of in zip(own.tolist(), of_class.tolist(), strict=True)],
            table.tolist() if self._whole else [],
        )


@dataclass(frozen=True)
class Evaluation:
    """`per_class` holds the accuracy of each class, None where no image is of it; `confusion` how many images of each
    class (row) were taken for each (column), nothing for more than MOST_CLASSES."""

    sums: Sums
    top5: float
    per_class: list[float | None]
    confusion: list[list[int]]

    def to_dict(self, epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "loss": self.sums.loss if math.isfinite(self.sums.loss) else None,
            "top1": self.sums.accuracy,
            "top5": self.top5,
            "images": self.sums.images,
            "per_class": self.per_class,
            "confusion": self.confusion,
        }


def evaluation_file(classes: Sequence[str], last: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """What `evaluation.json` holds."""
    return {"format": EVALUATION_FORMAT, "classes": list(classes), "last": last, "best": best}

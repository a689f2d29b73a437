"""A trained run, measured again: on the data that it was evaluated on, or on another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.data_sections import Augment, Data
from engine.config.loader import check, typed_value
from engine.config.schema import Config, as_dict
from engine.data.limits import auto_workers
from engine.data.pipelines.loader import Batches, LoaderProcessError
from engine.data.sampler import BatchRequest, Part
from engine.data.sources.base import Source, UnreadableImageError
from engine.data.sources.open import open_source
from engine.inference.trained_model import Saved, build_trained
from engine.training.losses import build_loss
from engine.training.metrics import Evaluation, Tally
from engine.utils.errors import Problem, UsageError, nearest

Which = Literal["val", "train", "all"]
# Keys of data that say how images reach the model, which it was trained with and keeps.
OF_THE_CHECKPOINT = ("image_size", "channels", "mean", "std")
SHOWN_CLASSES = 10


@dataclass(frozen=True)
class Measured:
    """`images` is how many there are of each of the model's classes."""

    config: Config
    evaluation: Evaluation
    images: list[int]
    unread: tuple[str, ...]


def measure(saved: Saved, changes: Sequence[str] = (), part: Which = "val", device: str = "auto") -> Measured:
    """Each image of a part of the data once, without augmentation. `changes` are `data.key=value`. Raises
    UsageError."""
    config = config_for(saved, changes)
    source = open_source(config)
    places = places_of(source.classes, saved.classes)
    labels = {one: places[source.labels_of(one)] for one in parts_of("all")}
    images = np.bincount(np.concatenate([labels[one] for one in parts_of(part)]), minlength=len(saved.classes))
    if not images.any():
        raise UsageError.one("--part", f"{part} holds no image of {config.data.dataset}; give another")

    # Loader processes are forked before this process touches CUDA or starts threads.
    workers: int = 0 if source.in_memory else auto_workers(1, config.data.batch)
    if config.data.workers != "auto":
        workers = config.data.workers
    batches = Batches(source, config, saved.image_format, requests_of(source, part, config.data.batch), workers)
    trained = build_trained(saved, device)
    counts = np.bincount(labels["train"], minlength=len(saved.classes))
    criterion = build_loss(config, len(saved.classes), lambda: counts, trained.device)
    tally = Tally(trained.device, len(saved.classes))
    unread: list[str] = []
    table = torch.from_numpy(places)
    try:
        for batch in batches:
            unread += batch.unread
            if batch.weight > 0:
                logits, wanted = trained.logits(batch.images), table[batch.labels].to(trained.device)
                tally.add(criterion(logits, wanted), logits, wanted)
    except UnreadableImageError as error:
        raise UsageError.one("data.path", f"{error}; data.on_bad=skip leaves such images out") from error
    except torch.OutOfMemoryError as error:
        what = f"{config.data.batch} images at once do not fit into the memory of {trained.device}"
        raise UsageError.one("data.batch_size", f"{what}; give fewer, or --device cpu") from error
    except RuntimeError as error:
        try:
            batches.name_the_dead()
        except LoaderProcessError as death:
            raise UsageError.one("data.workers", f"{death}; data.workers=0 loads in this process") from error
        raise
    return Measured(config, tally.alone(), images.tolist(), tuple(unread))


def config_for(saved: Saved, changes: Sequence[str]) -> Config:
    """The config of a checkpoint on other data, whose images are brought to the form that its model knows. Raises
    UsageError with every problem found."""
    values = as_dict(saved.config)
    data: dict[str, Any] = values["data"]
    # Each image comes once.
    data |= {"pipeline": "stream"}
    if any(change.partition("=")[0].strip() in ("data.dataset", "data.path") for change in changes):
        # What it says of the data that it was trained on need not hold of another's.
        data |= {"num_classes": None}
    problems: list[Problem] = []
    for change in changes:
        key, given, value = change.partition("=")
        section, _, name = key.strip().partition(".")
        if not given:
            problems.append(Problem(change, "give values as data.key=value"))
        elif section != "data":
            problems.append(Problem(key, "is of training; only keys of data can be given here"))
        elif name not in Data.model_fields:
            known = [f"data.{one}" for one in Data.model_fields if one not in OF_THE_CHECKPOINT]
            problems.append(Problem(key, f"there is no such key{nearest(key, known)}"))
        elif name in OF_THE_CHECKPOINT:
            problems.append(Problem(key, "is what the model was trained with, and stays so; leave it out"))
        else:
            try:
                data[name] = typed_value(key.strip(), value)
            except UsageError as error:
                problems += error.problems
    if problems:
        raise UsageError(problems)
    images = saved.image_format
    data |= {"image_size": images.size, "channels": images.channels, "mean": images.mean, "std": images.std}
    return check(values | {"augment": Augment().model_dump(mode="json")})


def places_of(found: Sequence[str], known: Sequence[str]) -> NDArray[np.int64]:
    """The model's number of each of the data's classes, by name. Raises UsageError where it does not know one."""
    numbers = {name: number for number, name in enumerate(known)}
    strange = [name for name in found if name not in numbers]
    if strange:
        raise UsageError.one(
            "data.path",
            f"the model does not know {_listed(strange)}; its classes are {_listed(known)}",
        )
    return np.array([numbers[name] for name in found], np.int64)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    return ", ".join(names[:SHOWN_CLASSES]) + more


def parts_of(which: Which) -> tuple[Part, ...]:
    return ("train", "val") if which == "all" else (which,)


def requests_of(source: Source, which: Which, batch: int) -> Iterator[BatchRequest]:
    for part in parts_of(which):
        for start in range(0, source.count(part), batch):
            yield BatchRequest(part, 0, np.arange(start, min(start + batch, source.count(part))))

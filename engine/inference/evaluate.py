"""A trained run, measured again: on the data that it was evaluated on, or on another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.data_sections import AugmentConfig, DataConfig
from engine.config.loader import parse_value, validate_config
from engine.config.schema import Config, as_dict
from engine.data.limits import auto_workers
from engine.data.pipelines.loader import BatchLoader, LoaderProcessError
from engine.data.sampler import BatchRequest, Part
from engine.data.sources.base import ImageSource, UnreadableImageError
from engine.data.sources.open import open_source
from engine.inference.trained_model import TrainedCheckpoint, build_trained_model
from engine.training.losses import build_loss
from engine.training.metrics import Evaluation, EvaluationAccumulator
from engine.utils.errors import Problem, UsageError, did_you_mean

EvaluationPart = Literal["val", "train", "all"]
# Keys of data that say how images reach the model, which it was trained with and keeps.
CHECKPOINT_DATA_KEYS = ("image_size", "channels", "mean", "std")
MAX_LISTED_CLASSES = 10


@dataclass(frozen=True)
class CheckpointEvaluation:
    """`images_per_class` is how many there are of each of the model's classes."""

    config: Config
    evaluation: Evaluation
    images_per_class: list[int]
    unread: tuple[str, ...]


def evaluate_checkpoint(
    checkpoint: TrainedCheckpoint, overrides: Sequence[str] = (), part: EvaluationPart = "val", device: str = "auto"
) -> CheckpointEvaluation:
    """Each image of a part of the data once, without augmentation. `overrides` are `data.key=value`. Raises
    UsageError."""
    config = evaluation_config(checkpoint, overrides)
    source = open_source(config)
    places = class_indices(source.classes, checkpoint.classes)
    labels = {one: places[source.get_labels(one)] for one in expand_parts("all")}
    images = np.bincount(np.concatenate([labels[one] for one in expand_parts(part)]), minlength=len(checkpoint.classes))
    if not images.any():
        raise UsageError.one("--part", f"{part} holds no image of {config.data.dataset}; give another")

    # Loader processes are forked before this process touches CUDA or starts threads.
    workers: int = 0 if source.in_memory else auto_workers(1, config.data.numeric_batch_size)
    if config.data.workers != "auto":
        workers = config.data.workers
    batches = BatchLoader(
        source, config, checkpoint.image_format, batch_requests(source, part, config.data.numeric_batch_size), workers
    )
    trained = build_trained_model(checkpoint, device)
    counts = np.bincount(labels["train"], minlength=len(checkpoint.classes))
    criterion = build_loss(config, len(checkpoint.classes), lambda: counts, trained.device)
    tally = EvaluationAccumulator(trained.device, len(checkpoint.classes))
    unread: list[str] = []
    table = torch.from_numpy(places)
    try:
        for batch in batches:
            unread += batch.unread
            if batch.loss_weight > 0:
                logits, wanted = trained.logits(batch.images), table[batch.labels].to(trained.device)
                tally.add(criterion(logits, wanted), logits, wanted)
    except UnreadableImageError as error:
        raise UsageError.one("data.path", f"{error}; data.on_bad=skip leaves such images out") from error
    except torch.OutOfMemoryError as error:
        what = f"{config.data.numeric_batch_size} images at once do not fit into the memory of {trained.device}"
        raise UsageError.one("data.batch_size", f"{what}; give fewer, or --device cpu") from error
    except RuntimeError as error:
        try:
            batches.raise_if_worker_died()
        except LoaderProcessError as death:
            raise UsageError.one("data.workers", f"{death}; data.workers=0 loads in this process") from error
        raise
    return CheckpointEvaluation(config, tally.local_evaluation(), images.tolist(), tuple(unread))


def evaluation_config(checkpoint: TrainedCheckpoint, overrides: Sequence[str]) -> Config:
    """The config of a checkpoint on other data, whose images are brought to the form that its model knows. Raises
    UsageError with every problem found."""
    values = as_dict(checkpoint.config)
    data: dict[str, Any] = values["data"]
    # Each image comes once.
    data |= {"pipeline": "stream"}
    if any(change.partition("=")[0].strip() in ("data.dataset", "data.path") for change in overrides):
        # What it says of the data that it was trained on need not hold of another's.
        data |= {"num_classes": None}
    problems: list[Problem] = []
    for change in overrides:
        key, given, value = change.partition("=")
        section, _, name = key.strip().partition(".")
        if not given:
            problems.append(Problem(change, "give values as data.key=value"))
        elif section != "data":
            problems.append(Problem(key, "is of training; only keys of data can be given here"))
        elif name not in DataConfig.model_fields:
            known = [f"data.{one}" for one in DataConfig.model_fields if one not in CHECKPOINT_DATA_KEYS]
            problems.append(Problem(key, f"there is no such key{did_you_mean(key, known)}"))
        elif name in CHECKPOINT_DATA_KEYS:
            problems.append(Problem(key, "is what the model was trained with, and stays so; leave it out"))
        else:
            try:
                data[name] = parse_value(key.strip(), value)
            except UsageError as error:
                problems += error.problems
    if problems:
        raise UsageError(problems)
    images = checkpoint.image_format
    data |= {"image_size": images.size, "channels": images.channels, "mean": images.mean, "std": images.std}
    return validate_config(values | {"augment": AugmentConfig().model_dump(mode="json")})


def class_indices(data_classes: Sequence[str], model_classes: Sequence[str]) -> NDArray[np.int64]:
    """The model's number of each of the data's classes, by name. Raises UsageError where it does not know one."""
    numbers = {name: number for number, name in enumerate(model_classes)}
    strange = [name for name in data_classes if name not in numbers]
    if strange:
        raise UsageError.one(
            "data.path",
            (
                f"the model does not know {_format_class_list(strange)}; its classes are "
                f"{_format_class_list(model_classes)}"
            ),
        )
    return np.array([numbers[name] for name in data_classes], np.int64)


def _format_class_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_CLASSES} more" if len(names) > MAX_LISTED_CLASSES else ""
    return ", ".join(names[:MAX_LISTED_CLASSES]) + more


def expand_parts(parts: EvaluationPart) -> tuple[Part, ...]:
    return ("train", "val") if parts == "all" else (parts,)


def batch_requests(source: ImageSource, parts: EvaluationPart, batch_size: int) -> Iterator[BatchRequest]:
    for part in expand_parts(parts):
        for start in range(0, source.num_images(part), batch_size):
            yield BatchRequest(part, 0, np.arange(start, min(start + batch_size, source.num_images(part))))

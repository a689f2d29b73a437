"""Evaluation of a trained model on its own validation set or on other data. Called by `gputrain evaluate`.

Uses `trained_model` for the model, and the data sources, loader, loss and metrics of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.host import available_cores
from engine.base.text import list_names
from engine.config.code_trust import CodeTrust
from engine.config.data_sections import ENCODED_DATASETS, AugmentConfig
from engine.config.loader import dataset_of, parse_override, validate_config
from engine.config.schema import Config, as_dict
from engine.train.data.augment.batch_ops import labels_to_device
from engine.train.data.checks import build_sampler_from_counts, class_counts
from engine.train.data.plan import auto_workers
from engine.train.data.sampler import Indices, Part
from engine.train.data.sources.base import ImageFormat, ImageSource, UnreadableImageError
from engine.train.data.sources.formats import format_from_config
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchLoader
from engine.train.distributed.failures import find_cause
from engine.train.inference.trained_model import TrainedCheckpoint, build_trained_model
from engine.train.loop.metrics import Evaluation
from engine.train.loop.own_metrics import OwnMetrics
from engine.train.loop.tasks.base import Task
from engine.train.models.factory import check_model

EvaluationPart = Literal["val", "train", "all"]
# Keys that the checkpoint fixes. The other keys of the input format can be overridden.
CHECKPOINT_KEYS = ("data.image_size", "data.size_schedule", "data.channels", "data.mean", "data.std")
# Sections whose keys an evaluation may change.
OVERRIDABLE = ("data", "eval")
MAX_LISTED_CLASSES = 10
MAX_WORKERS = 8  # loader processes or decode threads


@dataclass(frozen=True)
class CheckpointEvaluation:
    """Result of an evaluation.

    `images_per_class` has the number of images of each of the model's classes, `unread` the paths of unreadable images.
    `source` has the images, and `image_format` is how they were evaluated.
    """

    config: Config
    source: ImageSource
    image_format: ImageFormat
    evaluation: Evaluation
    images_per_class: list[int]
    unread: tuple[str, ...]


# Receives the part, the indices, the logits (N x classes) and the targets of images, both on the device, and the task.
ImageObserver = Callable[[Part, Indices, Tensor, Tensor, Task], None]


def evaluate_checkpoint(
    checkpoint: TrainedCheckpoint,
    overrides: Sequence[str] = (),
    part: EvaluationPart = "val",
    device: str = "auto",
    observe: ImageObserver | None = None,
    max_images: int | None = None,
) -> CheckpointEvaluation:
    """Evaluate a checkpoint once on every image of a split, without augmentation.

    `overrides` are `data.key=value` or `eval.key=value`. Raises UsageError for invalid overrides, for data that cannot
    be read or does not match the model's classes, for code of somebody else, and if the device runs out of memory.
    """
    config = evaluation_config(checkpoint, overrides)
    trust = evaluation_trust(checkpoint, overrides)
    trust.check(config, ("data.dataset", "model.name", "loss.name", "eval.metrics"))
    trained_format = checkpoint.image_format
    # The sizes of the training stay those of the checkpoint.
    images = replace(format_from_config(config.data, trained_format), epoch_sizes=trained_format.epoch_sizes)
    checkpoint = replace(checkpoint, image_format=images)
    source = open_source(config)
    class_map = class_indices(source.classes, checkpoint.classes)
    num_images = sum(source.num_images(name) for name in expand_parts(part))
    images_per_class = np.zeros(len(checkpoint.classes), np.int64)
    for name in expand_parts(part):
        counts = class_counts(source, name)
        # Each image has all numbers of a regression.
        images_per_class[class_map] += counts if counts.size else source.num_images(name)
    if not num_images:
        raise UsageError.one(
            "--split", f"{part} has no images in {config.data.dataset}; select another split", code="no-images"
        )
    if max_images is not None and num_images > max_images:
        reason = f"{part} has {num_images:,} images; at most {max_images:,} can be inspected"
        raise UsageError.one("--split", reason, "select another split", code="too-many")

    # DataLoader workers are forked, so they must start before this process initializes CUDA or starts threads.
    workers: int = 0
    if not source.in_memory:
        # Not measured, unlike in training, so a host with many cores gets no more than shared memory surely holds.
        workers = min(auto_workers(available_cores(), config.data.numeric_batch_size), MAX_WORKERS)
    if config.data.workers != "auto":
        workers = config.data.workers
    sampler, parts = build_sampler_from_counts(config, 0, 0, world_size=1), expand_parts(part)
    requests = [each for name in parts for each in sampler.evaluation_requests(name, source.num_images(name))]
    batches = BatchLoader(source, config, checkpoint.image_format, requests, workers)
    tested = checkpoint.config.model_copy(update={"eval": config.eval})
    trained = build_trained_model(replace(checkpoint, config=tested), device)
    if images.val_size != images.size:
        check_model(trained.model, config, images, images.val_size, len(checkpoint.classes), size_key="data.val_crop")
    task = trained.task
    own = OwnMetrics(config, task, num_images)
    accumulator = task.accumulator(keeps_outputs=bool(own))
    unread_files: list[str] = []
    try:
        for request, batch in zip(requests, batches, strict=True):
            unread_files += batch.unread
            if batch.loss_weight > 0:
                logits = trained.logits(batch.images)
                targets = labels_to_device(task.map_labels(batch.labels, class_map), trained.device)
                accumulator.add(task.validation_loss(logits, targets), logits, targets)
                if observe is not None:
                    indices = request.indices if batch.readable is None else batch.readable
                    observe(request.part, indices, logits, targets, task)
    except UnreadableImageError as error:
        raise UsageError.one(
            "data.path",
            f"{find_cause(error).reason}; skip unreadable images with data.on_bad=skip",
            code="bad-image",
        ) from error
    except torch.OutOfMemoryError as error:
        reason = f"a batch of {config.data.numeric_batch_size} images does not fit into the memory of {trained.device}"
        raise UsageError.one(
            "data.batch_size", f"{reason}; reduce data.batch_size, or use --gpus cpu", code="out-of-memory"
        ) from error
    except RuntimeError as error:
        if (death := batches.worker_death()) is None:
            raise
        advice = "load images in the main process with data.workers=0"
        raise UsageError.one("data.workers", str(death), advice, code=death.code) from error
    evaluation, failures = accumulator.all_reduce(), list[Problem]()
    evaluation = own.add_to(evaluation, accumulator.outputs, failures.append, selects=False)
    raise_if_any(failures)
    return CheckpointEvaluation(config, source, images, evaluation, images_per_class.tolist(), tuple(unread_files))


def evaluation_config(checkpoint: TrainedCheckpoint, overrides: Sequence[str]) -> Config:
    """Return the config of a checkpoint with `overrides` of `OVERRIDABLE`, and the model's own input format.

    Raises UsageError with all problems.
    """
    values = as_dict(checkpoint.config)
    data: dict[str, Any] = values["data"]
    # The only pipeline that yields each image exactly once.
    data |= {"pipeline": "stream", "size_schedule": []}
    if data["num_classes"] is not None:
        # The dataset fake generates as many, and somebody else's checkpoint can name any number.
        data |= {"num_classes": len(checkpoint.classes)}
    overridden = {override.partition("=")[0].strip() for override in overrides}
    if not overridden.isdisjoint(("data.dataset", "data.path")):
        # The number of classes and the validation shards are those of the training data.
        data |= {"num_classes": None, "val_path": None}
    images = checkpoint.image_format
    data |= {"val_resize": images.val_resize, "val_crop": images.val_size}
    data |= {"fit": images.fit, "interpolation": images.interpolation}
    problems: list[Problem] = []
    for override in overrides:
        with collect_problems(problems):
            key, value = parse_override(override)
            section, _, name = key.partition(".")
            if section not in OVERRIDABLE:
                reason = "cannot be changed for an evaluation; only keys of data and eval can"
                raise UsageError.one(key, reason, code="fixed-value")
            if key in CHECKPOINT_KEYS:
                raise UsageError.one(key, "is fixed by the checkpoint; omit it", code="fixed-value")
            values[section][name] = value
    raise_if_any(problems)
    if "data.path" in overridden and "data.dataset" not in overridden and data["dataset"] in ENCODED_DATASETS:
        data["dataset"] = dataset_of(str(data["path"]))
    if not images.is_float:
        data |= {"image_size": images.size, "channels": images.channels, "mean": images.mean, "std": images.std}
    return validate_config(values | {"augment": AugmentConfig().model_dump(mode="json")})


def evaluation_trust(checkpoint: TrainedCheckpoint, overrides: Sequence[str]) -> CodeTrust:
    """Return whose code the config of an evaluation may name: the user trusts what the user typed."""
    typed = {override.partition("=")[0].strip() for override in overrides}
    foreign = {key: reason for key, reason in checkpoint.code_trust.foreign.items() if key not in typed}
    return replace(checkpoint.code_trust, foreign=foreign)


def class_indices(data_classes: Sequence[str], model_classes: Sequence[str]) -> NDArray[np.int64]:
    """Map the classes of the data to class indices of the model, by name.

    Returns an int64 array with one index per class of the data. Raises UsageError for classes that the model lacks.
    """
    index_by_name = {name: index for index, name in enumerate(model_classes)}
    unknown_names = [name for name in data_classes if name not in index_by_name]
    if unknown_names:
        raise UsageError.one(
            "data.path",
            (
                f"the model has no class {list_names(unknown_names, MAX_LISTED_CLASSES)}; its classes are "
                f"{list_names(model_classes, MAX_LISTED_CLASSES)}"
            ),
            code="bad-label",
        )
    return np.array([index_by_name[name] for name in data_classes], np.int64)


def expand_parts(parts: EvaluationPart) -> tuple[Literal["train", "val"], ...]:
    """Return the dataset parts that "all", "train" or "val" selects."""
    return ("train", "val") if parts == "all" else (parts,)

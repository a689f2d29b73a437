"""Check a dataset against its config, and build the batch sampler of a rank.

Preflight, the form, `gputrain data` and every rank call it. The order of the images and their batches come from
`engine.train.data.sampler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.base.errors import Problem, raise_if_any
from engine.base.text import list_names
from engine.config.data_sections import ENCODED_DATASETS
from engine.config.schema import Config
from engine.config.tasks import task_facts
from engine.config.training_sections import BUILTIN_MODELS
from engine.config.user_code import is_user_code
from engine.train.data.sampler import DistributedBatchSampler, Part
from engine.train.data.sources.base import EncodedSource, ImageSource, Labels
from engine.train.data.sources.image import open_image

ALLOW_EMPTY = "data.allow_empty=true"
# Share of the training images that drop_last may drop in each epoch without a warning.
MAX_DROPPED_SHARE = 0.1
# Training images of the largest class per image of the smallest one, from which on they are reported.
MIN_IMBALANCE = 10
# Files whose headers the warning reads: enough for the median, and few enough for each check of the form.
MEDIAN_FILES = 16
# Smaller images, as a share of the input, are reported: most pixels that the network computes on are interpolated.
MIN_INPUT_SHARE = 0.5
# Networks of torchvision and timm halve the image five times, and patches of transformers divide it.
LIBRARY_SIZE_STEP = 32


def build_sampler(
    config: Config, source: ImageSource, world_size: int, rank: int = 0, devices_per_rank: int = 1
) -> DistributedBatchSampler:
    """Return the sampler of a rank for a source, with a batch size of `data.batch_size` per device. Raises UsageError
    if labels that it needs cannot be read."""
    counts = source.num_images("train"), source.num_images("val")
    labels = None if config.data.sampler == "shuffle" else source.get_labels("train")
    sampler = build_sampler_from_counts(config, *counts, world_size, rank, devices_per_rank)
    return replace(sampler, balanced_labels=labels)


def build_sampler_from_counts(
    config: Config, train_images: int, val_images: int, world_size: int, rank: int = 0, devices_per_rank: int = 1
) -> DistributedBatchSampler:
    """Return the sampler of a rank for the given numbers of training and validation images."""
    data = config.data
    return DistributedBatchSampler(
        train_images=train_images,
        val_images=val_images,
        batch_size=data.numeric_batch_size * devices_per_rank,
        rank=rank,
        world_size=world_size,
        drop_last=data.drop_last,
        seed=config.run.seed,
        accumulate=config.optim.accumulate,
        devices_per_rank=devices_per_rank,
    )


def sampler_problems(sampler: DistributedBatchSampler) -> Iterator[Problem]:
    """Yield a problem for each part that yields no batch."""
    if sampler.train_images == 0:
        yield Problem("data", "there are no training images", "add images", code="no-images")
    elif sampler.steps_per_epoch == 0:
        yield Problem(
            "data.batch_size",
            f"the global batch size is {sampler.global_batch} (world size {sampler.world_size} x "
            f"{sampler.batch_size * sampler.accumulate} images), but there are {sampler.train_images} training images",
            "reduce data.batch_size or set data.drop_last=false",
            code="too-large",
        )
    if sampler.val_images == 0:
        advice = "add images: data.val_split holds out at least one of each class with two or more"
        yield Problem("data", "there are no validation images", advice, code="no-images")


def sampler_warnings(sampler: DistributedBatchSampler) -> Iterator[Problem]:
    """Yield a warning if `data.drop_last` drops more than `MAX_DROPPED_SHARE` of the training images."""
    if sampler.dropped_images > MAX_DROPPED_SHARE * sampler.train_images:
        reason = (
            f"{sampler.dropped_images} of {sampler.train_images} training images do not fill a step and are dropped in "
            "each epoch"
        )
        yield Problem("", reason, "set data.drop_last=false to train on them", code="images-dropped")


def check_source(config: Config, source: ImageSource, sampler: DistributedBatchSampler) -> None:
    """Check the classes, channels and number of images of a source. Raises UsageError if they contradict the config."""
    data, problems = config.data, list[Problem]()
    if len(source.classes) < 2 and config.task.name != "regression":
        reason = f"the training images have no two different {task_facts(config).outputs}"
        problems.append(Problem("data", reason, "add images of others", code="too-few-classes"))
    elif not _keeps_empty_classes(config):
        problems += empty_class_problems(source.classes, source.get_labels("train"), source.skipped)
    if data.num_classes is not None and data.num_classes != len(source.classes):
        problems.append(
            Problem(
                "data.num_classes",
                f"is {data.num_classes}, but {data.dataset} has {len(source.classes)} {task_facts(config).outputs}",
                "remove it",
                code="conflict",
            )
        )
    problems += sampler_problems(sampler)
    channels = data.channels or source.format.channels
    for key in ("mean", "std"):
        values = getattr(data, key)
        if values is not None and len(values) != channels and not source.format.is_float:
            problems.append(
                Problem(
                    f"data.{key}",
                    f"has {len(values)} values, but the images have {channels} channels",
                    "use one value per channel",
                    code="conflict",
                )
            )
    if source.format.is_float:
        problems += _float_image_problems(config)
    raise_if_any(problems)


def _float_image_problems(config: Config) -> list[Problem]:
    """Return a problem for each key that works on uint8 images alone."""
    keys = {
        "data": ("image_size", "size_schedule", "channels", "mean", "std", "val_crop", "val_resize"),
        "augment": ("resized_crop", "brightness", "contrast", "saturation", "hue", "grayscale", "policy"),
    }
    reason = f"is not available for the floating-point tensors of {config.data.dataset}"
    defaults = Config()
    return [
        Problem(f"{section}.{key}", reason, "do it in the dataset, or in augment.transform", code="not-supported")
        for section, names in keys.items()
        for key in names
        if getattr(getattr(config, section), key) != getattr(getattr(defaults, section), key)
    ]


def empty_class_problems(classes: Sequence[str], labels: Labels, skipped: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of classes or labels without a training image, whose `labels` are given."""
    empty = [classes[label] for label in np.flatnonzero(_count_labels(labels, len(classes)) == 0).tolist()]
    if empty:
        subject = "a class has" if len(empty) == 1 else f"{len(empty)} classes have"
        files = f" (skipped: {list_names(skipped)})" if skipped else ""
        reason = f"{subject} no training image and cannot be learned: {list_names(empty)}{files}"
        yield Problem("data", reason, f"add images, or keep empty classes with {ALLOW_EMPTY}", code="empty-class")


def _keeps_empty_classes(config: Config) -> bool:
    """Whether a class without a training image is no mistake that ends the run, but a warning."""
    data = config.data
    return data.allow_empty or data.dataset not in ENCODED_DATASETS or config.task.name != "classification"


def _unvalidated_class_warnings(source: ImageSource) -> Iterator[Problem]:
    """Yield a warning if classes with training images have no validation image, though there are some."""
    in_train, in_val = class_counts(source), class_counts(source, "val")
    names = [source.classes[label] for label in np.flatnonzero((in_train > 0) & (in_val == 0))]
    if names and source.num_images("val"):
        subject = "a class has" if len(names) == 1 else f"{len(names)} classes have"
        reason = f"{subject} no validation image, so the validation metrics leave out {list_names(names)}"
        yield Problem("data", reason, "add images", code="empty-class")


def _similar_class_warnings(source: ImageSource) -> Iterator[Problem]:
    """Yield a warning if the names of classes differ in case only."""
    by_name: dict[str, list[str]] = {}
    for name in source.classes:
        by_name.setdefault(name.casefold(), []).append(name)
    similar = [" and ".join(names) for names in by_name.values() if len(names) > 1]
    if similar:
        reason = f"classes differ in case only: {list_names(similar)}"
        advice = "merge them if they are one class"
        yield Problem("data", reason, advice, code="similar-classes")


def _imbalance_warnings(config: Config, source: ImageSource) -> Iterator[Problem]:
    """Yield a warning if a class has far more training images than another, and the loss does not weigh them."""
    if config.task.name != "classification" or "balanced" in (config.loss.class_weights, config.data.sampler):
        return
    counts = class_counts(source)
    least, most = np.where(counts > 0, counts, counts.max(initial=0)).argmin(), counts.argmax()
    if counts[most] >= MIN_IMBALANCE * counts[least]:
        reason = (
            f"class {source.classes[most]} has {counts[most]} training images and class {source.classes[least]} "
            f"{counts[least]}, so the model may ignore the smaller one"
        )
        advice = "weigh them with loss.class_weights=balanced, or draw them equally often with data.sampler=balanced"
        yield Problem("data", reason, advice, code="imbalanced-classes")


def dataset_warnings(config: Config, source: ImageSource) -> list[Problem]:
    """Return the warnings of a dataset: of its classes, its images, and images far smaller than the default input.

    `gputrain data`, the preflight and the form show them."""
    warnings = list(source.warnings)
    # Random labels of generated images may miss a class.
    if config.data.dataset != "fake":
        if _keeps_empty_classes(config):
            empty = empty_class_problems(source.classes, source.get_labels("train"), source.skipped)
            warnings += (replace(problem, advice="") for problem in empty)
        warnings += _unvalidated_class_warnings(source)
        warnings += [*_similar_class_warnings(source), *_imbalance_warnings(config, source)]
    return [*warnings, *small_image_warnings(config, source)]


def check_dataset(config: Config, source: ImageSource) -> None:
    """Raise UsageError for a dataset that no run with this config can train on, whatever its batch size and ranks."""
    smallest = config.with_values(data={"batch_size": 1}, optim={"accumulate": 1})
    check_source(smallest, source, build_sampler(smallest, source, 1))


def class_counts(source: ImageSource, part: Part = "train") -> NDArray[np.int64]:
    """Return the number of images of each class or label in a part, int64 of shape (num_classes,).

    It is empty for targets that are numbers."""
    return _count_labels(source.get_labels(part), len(source.classes))


def _count_labels(labels: Labels, num_classes: int) -> NDArray[np.int64]:
    if labels.dtype.kind == "f":
        return np.empty(0, np.int64)
    return np.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(0, np.int64)


@dataclass(frozen=True)
class ImageFiles:
    """Sizes and modes of image files, from the headers of `examined` evenly spaced files.

    `sizes` are the smallest, the median and the largest width and height in pixels, as stored. `modes` counts format
    and Pillow mode.
    """

    examined: int
    sizes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    modes: dict[str, int]


def examine_files(source: EncodedSource, max_files: int) -> ImageFiles | None:
    """Read the headers of up to `max_files` files; None if none is readable."""
    num_train = source.num_images("train")
    count = num_train + source.num_images("val")
    chosen = np.unique(np.linspace(0, count - 1, min(count, max_files)).round().astype(np.int64))
    sizes: list[tuple[int, int]] = []
    modes: Counter[str] = Counter()
    for index in chosen.tolist():
        part: Part = "train" if index < num_train else "val"
        position = index if part == "train" else index - num_train
        # A file that became unreadable after the scan; training reports it. Decoders raise arbitrary exceptions.
        with suppress(Exception), open_image(source.read_encoded(part, position)) as image:
            sizes.append(image.size)
            modes[f"{image.format} {image.mode}"] += 1
    if not sizes:
        return None
    sizes.sort(key=lambda size: size[0] * size[1])
    return ImageFiles(len(sizes), (sizes[0], sizes[len(sizes) // 2], sizes[-1]), dict(modes.most_common()))


def enlarged_edge(config: Config, source: ImageSource) -> int:
    """Return the shorter edge in pixels of the median image file, if the default input is more than twice as large.

    Else 0: also for a size that the user or the pretrained weights set, and for data without image files."""
    if config.data.image_size is not None or config.data.size_schedule or not isinstance(source, EncodedSource):
        return 0
    files = examine_files(source, MEDIAN_FILES)
    edge = 0 if files is None else min(files.sizes[1])
    return edge if edge < MIN_INPUT_SHARE * source.format.size else 0


def fitting_size(config: Config, edge: int) -> int:
    """Return the `data.image_size` to advise for images with this shorter edge, which the model can take."""
    model = config.model
    if is_user_code(model.name) or (model.source in ("auto", "builtin") and model.name in BUILTIN_MODELS):
        return edge
    return -(-edge // LIBRARY_SIZE_STEP) * LIBRARY_SIZE_STEP


def small_image_warnings(config: Config, source: ImageSource) -> Iterator[Problem]:
    """Yield a warning if training would enlarge most images to more than twice their size."""
    size = source.format.size
    if edge := enlarged_edge(config, source):
        yield Problem(
            "data.image_size",
            f"the images have about {edge} x {edge} pixels and are enlarged to {size} x {size}, the default",
            f"train faster with data.image_size={fitting_size(config, edge)}, or set {size} to keep this size",
            code="images-enlarged",
        )

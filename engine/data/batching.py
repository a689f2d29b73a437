"""How a dataset divides into batches per rank, and what is checked before training starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.config.schema import Config
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.base import ImageSource
from engine.utils.errors import Problem, UsageError

# So large a share of the training images is not left out of each epoch without a word.
MAX_DROPPED_SHARE = 0.1


def build_sampler(
    config: Config, source: ImageSource, world_size: int, rank: int = 0, devices_per_rank: int = 1
) -> DistributedBatchSampler:
    """How the images of a source are dealt out under a config: `data.batch_size` at once to each device."""
    return build_sampler_from_counts(
        config, source.num_images("train"), source.num_images("val"), world_size, rank, devices_per_rank
    )


def build_sampler_from_counts(
    config: Config, train_images: int, val_images: int, world_size: int, rank: int = 0, devices_per_rank: int = 1
) -> DistributedBatchSampler:
    """The same for so many images of the two parts."""
    data, seed, accumulate = config.data, config.run.seed, config.optim.accumulate
    batch = data.numeric_batch_size * devices_per_rank
    return DistributedBatchSampler(
        train_images=train_images,
        val_images=val_images,
        batch_size=batch,
        rank=rank,
        world_size=world_size,
        drop_last=data.drop_last,
        seed=seed,
        accumulate=accumulate,
        devices_per_rank=devices_per_rank,
    )


def sampler_problems(sampler: DistributedBatchSampler) -> list[Problem]:
    """What is wrong where a part of the data comes to no step at all."""
    problems = []
    if sampler.steps_per_epoch == 0:
        problems.append(
            Problem(
                "data.batch_size",
                f"{sampler.world_size} ranks with {sampler.batch_size * sampler.accumulate} images each take "
                f"{sampler.global_batch} a step, and there are {sampler.train_images} for training; give a "
                "smaller batch or data.drop_last=false",
            )
        )
    if sampler.val_images == 0:
        problems.append(Problem("data.val_split", "leaves no image for validation; give a larger share"))
    return problems


def sampler_warnings(sampler: DistributedBatchSampler) -> list[str]:
    """What of the training images an epoch makes no use of, where that is much."""
    if sampler.dropped_images <= MAX_DROPPED_SHARE * sampler.train_images:
        return []
    return [
        f"{sampler.dropped_images} of {sampler.train_images} training images fill no step and are left out of each "
        "epoch; data.drop_last=false takes them too"
    ]


def check_source(config: Config, source: ImageSource, sampler: DistributedBatchSampler) -> None:
    """Raises UsageError where the data and the config do not go together."""
    data, problems = config.data, []
    if data.num_classes is not None and data.num_classes != len(source.classes):
        problems.append(
            Problem(
                "data.num_classes",
                f"is {data.num_classes}, but {data.dataset} has {len(source.classes)} classes; leave it out",
            )
        )
    problems += sampler_problems(sampler)
    channels = data.channels or source.format.channels
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and len(given) != channels:
            problems.append(
                Problem(f"data.{key}", f"has {len(given)} values for images of {channels} channels; give one each")
            )
    if problems:
        raise UsageError(problems)


def class_counts(source: ImageSource) -> NDArray[np.int64]:
    """Training images of each class."""
    return np.bincount(source.get_labels("train"), minlength=len(source.classes))

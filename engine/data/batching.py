"""How a dataset divides into batches per rank, and what is checked before training starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.config.schema import Config
from engine.data.sampler import Shares
from engine.data.sources.base import Source
from engine.utils.errors import Problem, UsageError

# So large a share of the training images is not left out of each epoch without a word.
MUCH_DROPPED = 0.1


def shares_of(config: Config, source: Source, world_size: int, rank: int = 0, devices_a_rank: int = 1) -> Shares:
    """How the images of a source are dealt out under a config: `data.batch_size` at once to each device."""
    return shares_of_counts(config, source.count("train"), source.count("val"), world_size, rank, devices_a_rank)


def shares_of_counts(
    config: Config, train: int, val: int, world_size: int, rank: int = 0, devices_a_rank: int = 1
) -> Shares:
    """The same for so many images of the two parts."""
    data, seed, accumulate = config.data, config.run.seed, config.optim.accumulate
    batch = data.batch * devices_a_rank
    return Shares(train, val, batch, rank, world_size, data.drop_last, seed, accumulate, devices_a_rank)


def problems_of_shares(shares: Shares) -> list[Problem]:
    """What is wrong where a part of the data comes to no step at all."""
    problems = []
    if shares.steps_per_epoch == 0:
        problems.append(
            Problem(
                "data.batch_size",
                f"{shares.world_size} ranks with {shares.batch_size * shares.accumulate} images each take "
                f"{shares.global_batch} a step, and there are {shares.train_images} for training; give a "
                "smaller batch or data.drop_last=false",
            )
        )
    if shares.val_images == 0:
        problems.append(Problem("data.val_split", "leaves no image for validation; give a larger share"))
    return problems


def warnings_of_shares(shares: Shares) -> list[str]:
    """What of the training images an epoch makes no use of, where that is much."""
    if shares.dropped <= MUCH_DROPPED * shares.train_images:
        return []
    return [
        f"{shares.dropped} of {shares.train_images} training images fill no step and are left out of each epoch; "
        "data.drop_last=false takes them too"
    ]


def check_source(config: Config, source: Source, shares: Shares) -> None:
    """Raises UsageError where the data and the config do not go together."""
    data, problems = config.data, []
    if data.num_classes is not None and data.num_classes != len(source.classes):
        problems.append(
            Problem(
                "data.num_classes",
                f"is {data.num_classes}, but {data.dataset} has {len(source.classes)} classes; leave it out",
            )
        )
    problems += problems_of_shares(shares)
    channels = data.channels or source.format.channels
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and len(given) != channels:
            problems.append(
                Problem(f"data.{key}", f"has {len(given)} values for images of {channels} channels; give one each")
            )
    if problems:
        raise UsageError(problems)


def class_counts(source: Source) -> NDArray[np.int64]:
    """Training images of each class."""
    return np.bincount(source.labels_of("train"), minlength=len(source.classes))

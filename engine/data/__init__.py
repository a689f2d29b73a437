"""Where images come from and how they reach the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.config import Config
from engine.data.arrays import DIGITS_FORMAT, IMAGE_SETS, check_image_set, open_digits, open_fake, open_image_set
from engine.data.sampler import Shares
from engine.data.source import ImageFormat, Source
from engine.own import is_own
from engine.problems import Problem, UsageError

# So large a share of the training images is not left out of each epoch without a word.
MUCH_DROPPED = 0.1


def open_source(config: Config) -> Source:
    """The images that a config asks for. Raises UsageError."""
    data, seed = config.data, config.run.seed
    if data.dataset == "digits":
        return open_digits(data, seed)
    if data.dataset == "fake":
        return open_fake(data, seed)
    if data.dataset == "folder":
        from engine.data.folder import open_folder

        return open_folder(data, seed)
    if is_own(data.dataset):
        from engine.data.own_source import open_own

        return open_own(data, config.run.code, seed)
    return open_image_set(data)


def open_early(config: Config) -> Source | None:
    """The source where it can be had without torch, to find its faults before ranks are started and to look into a
    folder once for all of them; None for torchvision's sets, of which only the files are looked for, and for the user's
    own data, at which `engine.data.look.check_own_data` looks."""
    if is_own(config.data.dataset):
        return None
    if config.data.dataset in IMAGE_SETS:
        check_image_set(config.data)
        return None
    return open_source(config)


def likely_format(config: Config) -> ImageFormat:
    """What the images will look like, as far as that is known without looking at them: nothing is opened."""
    data = config.data
    if data.dataset == "folder" or is_own(data.dataset):
        from engine.data.folder import DEFAULT_SIZE

        own = ImageFormat(DEFAULT_SIZE, 3, (), ())
    elif data.dataset == "fake":
        own = open_fake(data, config.run.seed).format
    else:
        own = DIGITS_FORMAT if data.dataset == "digits" else IMAGE_SETS[data.dataset].format
    return replace(own, size=data.image_size or own.size, channels=data.channels or own.channels)


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


def image_format(config: Config, source: Source) -> ImageFormat:
    """What the images look like to the model: the source's own format, but for what the config says otherwise."""
    data, own = config.data, source.format
    channels = data.channels or own.channels
    mean, std = own.mean, own.std
    if channels != own.channels:
        # Grey copied to three channels keeps its statistics; colour made grey has about the mean of them.
        mean = mean * 3 if channels == 3 else (sum(mean) / 3,)
        std = std * 3 if channels == 3 else (sum(std) / 3,)
    return replace(
        own, size=data.image_size or own.size, channels=channels, mean=data.mean or mean, std=data.std or std
    )

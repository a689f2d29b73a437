"""Test the user's own dataset and transform in a helper process.

`engine.jobs.launch.preflight` calls `check_user_data_code`: user code may import torch, print or exit, so a long-lived
process must not import it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from engine.base.answers import Answer
from engine.base.codec import Count, Record
from engine.base.helper_process import ParentPipe
from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.config.user_code import ask_user_code, is_user_code
from engine.train.data.checks import build_sampler, check_source
from engine.train.data.sampler import PARTS, BatchRequest
from engine.train.data.sources.base import ItemFormat
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source

# Creating a dataset may index it, or download it in the first run.
USER_CODE_TIMEOUT_SECONDS = 600.0


T = TypeVar("T")


class ImageCounts(Record, frozen=True):
    """Number of training and validation images."""

    train: Count
    val: Count


class DatasetQuestion(Record, frozen=True):
    """Request to the helper process.

    It loads the first images of each part for `ranks` ranks. With 0 ranks, it returns the format of the first item.
    """

    config: dict[str, Any]
    ranks: Count = 0


def check_user_data_code(config: Config, world_size: int) -> ImageCounts | None:
    """Load one training and one validation image with the user's code, and return the number of images of each part.

    Returns None without starting a process if the config names no such code. Raises UsageError if the code fails or
    returns unsupported values.
    """
    if not is_user_code(config.data.dataset) and config.augment.transform is None:
        return None
    key = "data.dataset" if is_user_code(config.data.dataset) else "augment.transform"
    return _ask_process(config, key, world_size, Answer[ImageCounts])


def find_item_format(config: Config) -> ItemFormat:
    """Return the size and the channels of the first item of a user dataset. Raises UsageError as
    `check_user_data_code`."""
    return _ask_process(config, "data.dataset", 0, Answer[ItemFormat])


def _ask_process(config: Config, key: str, ranks: int, kind: type[Answer[T]]) -> T:
    """Return the reply of the helper process that runs the user's code that a key names. Raises UsageError."""
    return ask_user_code(
        "engine.train.data.inspection_process",
        DatasetQuestion(config.model_dump(mode="json"), ranks),
        kind,
        USER_CODE_TIMEOUT_SECONDS,
        key=key,
        name=config.data.dataset if key == "data.dataset" else str(config.augment.transform),
        verb="tested",
        result="loaded the first images",
    )


def try_first_images(config: Config, world_size: int) -> ImageCounts:
    """Load and augment the first image of both parts as a run does. Raises UsageError if that fails."""
    from engine.train.data.batch import BatchDataset, load_checked

    source = open_source(config)
    check_source(config, source, build_sampler(config, source, world_size))
    batches = BatchDataset(source, config, model_input_format(config, source))
    for part in PARTS:
        load_checked(batches, BatchRequest(part, 1, np.array([0])))
    return ImageCounts(source.num_images("train"), source.num_images("val"))


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process: reply with the number of images, or with the problems of a config.

    Without ranks, reply with the format of the first item instead."""
    request = parent.receive(DatasetQuestion)

    def examine() -> ImageCounts | ItemFormat:
        config = validate_config(request.config)
        if request.ranks:
            return try_first_images(config, request.ranks)
        # It imports torch.
        from engine.train.data.sources.user_dataset import first_item_format

        return first_item_format(config.data, config.run)

    parent.send(Answer.of(examine))

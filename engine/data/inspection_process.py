"""Inspect the dataset of a config in a helper process.

Preflight calls `check_user_data_code`: user code may import torch, print or exit, so a long-lived process must not
import it. The form uses `DataInspection`: scanning a large folder is slow, and a killed process cancels it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.batching import build_sampler, check_source
from engine.data.sampler import PARTS, BatchRequest
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.builtin import TORCHVISION_DATASETS, check_torchvision_files
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import HelperError, HelperExitedError, HelperProcess, ParentPipe, start_helper


@dataclass(frozen=True)
class ImageCounts:
    """Number of training and validation images."""

    train: int
    val: int


def check_user_data_code(config: Config, world_size: int) -> None:
    """Load one training and one validation image with the user's dataset and transform, in a short-lived process.

    Returns without starting a process if the config names no such code. Raises UsageError if the code fails or returns
    unsupported values.
    """
    if not is_user_code(config.data.dataset) and config.augment.transform is None:
        return
    try:
        with _start_process() as helper:
            helper.send({"config": config.model_dump(mode="json"), "ranks": world_size})
            reply = helper.receive()
    except HelperExitedError as error:
        key = "data.dataset" if is_user_code(config.data.dataset) else "augment.transform"
        name = config.data.dataset if is_user_code(config.data.dataset) else config.augment.transform
        raise UsageError.one(
            key,
            f"{name} ended the process that tested it (exit code {error.exit_code})",
            "run it on its own to see why",
        ) from error
    _raise_problems(reply)


def count_images(config: Config) -> ImageCounts:
    """Count the images of a dataset. Raises UsageError if it is missing or unusable."""
    if config.data.dataset in TORCHVISION_DATASETS:
        check_torchvision_files(config.data)
        return ImageCounts(*TORCHVISION_DATASETS[config.data.dataset].counts)
    source = open_source(config)
    return ImageCounts(source.num_images("train"), source.num_images("val"))


def try_first_images(config: Config, world_size: int) -> ImageCounts:
    """Load and augment the first image of both parts as a run does. Raises UsageError if that fails."""
    from engine.data.augment.augmentation import UserTransformError
    from engine.data.pipelines.loader import BatchDataset

    source = open_source(config)
    check_source(config, source, build_sampler(config, source, world_size))
    batches = BatchDataset(source, config, model_input_format(config, source))
    for part in PARTS:
        try:
            batches[BatchRequest(part, 1, np.array([0]))]
        except UnreadableImageError as error:
            raise UsageError.one("data.dataset", str(error)) from error
        except UserTransformError as error:
            raise UsageError.one("augment.transform", str(error).removeprefix("augment.transform ")) from error
    return ImageCounts(source.num_images("train"), source.num_images("val"))


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process: reply with the number of images or the problems of a config.

    If the request has a number of `ranks`, the first image of both parts is loaded too.
    """
    request = parent.receive()
    try:
        config, world_size = validate_config(request["config"]), request["ranks"]
        images = count_images(config) if world_size is None else try_first_images(config, world_size)
        parent.send({"train": images.train, "val": images.val})
    except UsageError as error:
        parent.send({"problems": [[problem.location, problem.message] for problem in error.problems]})


def _start_process() -> HelperProcess:
    return start_helper("engine.data.inspection_process", keep_stderr=False)


def _raise_problems(reply: Mapping[str, Any]) -> None:
    if "problems" in reply:
        raise UsageError([Problem(location, message) for location, message in reply["problems"]])


class DataInspection:
    """Background inspection of the dataset of a config, started on construction."""

    def __init__(self, config: Config) -> None:
        self._helper = _start_process()
        run_section = {"seed": config.run.seed, "code": config.run.code}
        self._helper.send({"config": {"data": config.data.model_dump(mode="json"), "run": run_section}, "ranks": None})

    def wait(self) -> ImageCounts | None:
        """Wait for the image counts; None if the helper process failed or was canceled. Raises UsageError if the
        dataset is unusable."""
        try:
            with self._helper:
                reply = self._helper.receive()
        except HelperError:
            return None
        _raise_problems(reply)
        return ImageCounts(reply["train"], reply["val"])

    def cancel(self) -> None:
        self._helper.kill()

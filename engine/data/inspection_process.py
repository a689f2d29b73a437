"""What the data of a config is like, told by a helper process: to look through a large folder takes long, and
whoever asks may have changed their mind meanwhile; and the user's own code belongs into no process that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.loader import check
from engine.config.schema import Config
from engine.config.user_code import is_own
from engine.data.batching import check_source, shares_of
from engine.data.sampler import PARTS, BatchRequest
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.builtin import IMAGE_SETS, check_image_set
from engine.data.sources.formats import image_format
from engine.data.sources.open import open_source
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import HelperError, HelperExitedError, HelperProcess, ParentPipe, start_helper


@dataclass(frozen=True)
class Images:
    """Images of the training and the validation part."""

    train: int
    val: int


def check_own_data(config: Config, ranks: int) -> None:
    """Raises UsageError where the user's own dataset or transform cannot be trained with: both are imported, and a
    training and a validation image made, in a process that is gone afterwards. Nothing is done where there is neither.
    """
    if not is_own(config.data.dataset) and config.augment.transform is None:
        return
    try:
        with _start() as helper:
            helper.send({"config": config.model_dump(mode="json"), "ranks": ranks})
            told = helper.receive()
    except HelperExitedError as error:
        key = "data.dataset" if is_own(config.data.dataset) else "augment.transform"
        name = config.data.dataset if is_own(config.data.dataset) else config.augment.transform
        raise UsageError.one(
            key, f"{name} ended the process that tried it (exit code {error.exit_code}); try it by itself"
        ) from error
    _raise_problems(told)


def count_images(config: Config) -> Images:
    """Raises UsageError where the data cannot be used."""
    if config.data.dataset in IMAGE_SETS:
        check_image_set(config.data)
        return Images(*IMAGE_SETS[config.data.dataset].counts)
    source = open_source(config)
    return Images(source.count("train"), source.count("val"))


def try_first_images(config: Config, ranks: int) -> Images:
    """Raises UsageError where the first image of either part does not come through all that a run does with it."""
    from engine.data.augment.augmentation import OwnTransformError
    from engine.data.pipelines.loader import RequestedBatches

    source = open_source(config)
    check_source(config, source, shares_of(config, source, ranks))
    batches = RequestedBatches(source, config, image_format(config, source))
    for part in PARTS:
        try:
            batches[BatchRequest(part, 1, np.array([0]))]
        except UnreadableImageError as error:
            raise UsageError.one("data.dataset", str(error)) from error
        except OwnTransformError as error:
            raise UsageError.one("augment.transform", str(error).removeprefix("augment.transform ")) from error
    return Images(source.count("train"), source.count("val"))


def main(parent: ParentPipe) -> None:
    """The request holds a config, and the number of ranks where its first images are to be tried: answers how many
    images there are, or what is wrong with them."""
    request = parent.receive()
    try:
        config, ranks = check(request["config"]), request["ranks"]
        images = count_images(config) if ranks is None else try_first_images(config, ranks)
        parent.send({"train": images.train, "val": images.val})
    except UsageError as error:
        parent.send({"problems": [[problem.where, problem.what] for problem in error.problems]})


def _start() -> HelperProcess:
    return start_helper("engine.data.inspection_process", keep_stderr=False)


def _raise_problems(told: Mapping[str, Any]) -> None:
    if "problems" in told:
        raise UsageError([Problem(where, what) for where, what in told["problems"]])


class DataLook:
    """A look at the data of one config."""

    def __init__(self, config: Config) -> None:
        self._helper = _start()
        run = {"seed": config.run.seed, "code": config.run.code}
        self._helper.send({"config": {"data": config.data.model_dump(mode="json"), "run": run}, "ranks": None})

    def wait(self) -> Images | None:
        """The images; None where the look was given up. Raises UsageError where the data cannot be used."""
        try:
            with self._helper:
                told = self._helper.receive()
        except HelperError:
            return None
        _raise_problems(told)
        return Images(told["train"], told["val"])

    def give_up(self) -> None:
        self._helper.kill()

"""What the data of a config is like, told by a short-lived process: to look through a large folder takes long, and
whoever asks may have changed their mind meanwhile; and the user's own code belongs into no process that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.loader import check
from engine.config.schema import Config
from engine.config.user_code import is_own
from engine.data.batching import check_source, shares_of
from engine.data.sampler import BatchRequest, Part
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.builtin import IMAGE_SETS, check_image_set
from engine.data.sources.formats import image_format
from engine.data.sources.open import open_source
from engine.utils.errors import Problem, UsageError

PROGRAM = "from engine.data.inspection_process import main; main()"
PARTS: tuple[Part, ...] = ("train", "val")


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
    look = _start()
    try:
        told = _answer(look, {"config": config.model_dump(mode="json"), "ranks": ranks})
    except (OSError, ValueError) as error:
        key = "data.dataset" if is_own(config.data.dataset) else "augment.transform"
        name = config.data.dataset if is_own(config.data.dataset) else config.augment.transform
        raise UsageError.one(
            key, f"{name} ended the process that tried it (exit code {look.wait()}); try it by itself"
        ) from error
    finally:
        look.kill()
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


def main() -> None:
    """On standard input JSON of a config, and of the number of ranks where its first images are to be tried; on
    standard output JSON of its images, or of what is wrong with them."""
    # The user's own code may print.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked = json.load(sys.stdin)
    try:
        config = check(asked["config"])
        images = count_images(config) if asked["ranks"] is None else try_first_images(config, asked["ranks"])
        told: dict[str, Any] = {"train": images.train, "val": images.val}
    except UsageError as error:
        told = {"problems": [[problem.where, problem.what] for problem in error.problems]}
    with answer:
        json.dump(told, answer)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-P", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _answer(process: subprocess.Popen[str], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises OSError or ValueError where there is none."""
    output, _ = process.communicate(json.dumps(asked))
    told: Mapping[str, Any] = json.loads(output)
    return told


def _raise_problems(told: Mapping[str, Any]) -> None:
    if "problems" in told:
        raise UsageError([Problem(where, what) for where, what in told["problems"]])


class DataLook:
    """A look at the data of one config."""

    def __init__(self, config: Config) -> None:
        self._process = _start()
        run = {"seed": config.run.seed, "code": config.run.code}
        self._asked = {"config": {"data": config.data.model_dump(mode="json"), "run": run}, "ranks": None}

    def wait(self) -> Images | None:
        """The images; None where the look was given up. Raises UsageError where the data cannot be used."""
        try:
            told = _answer(self._process, self._asked)
        except (OSError, ValueError):
            return None
        _raise_problems(told)
        return Images(told["train"], told["val"])

    def give_up(self) -> None:
        self._process.kill()

"""How many images a config has, told by a short-lived process: to look through a large folder takes long, and whoever
asks may have changed their mind meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from engine.config import Config
from engine.data import open_early
from engine.data.arrays import IMAGE_SETS
from engine.problems import Problem, UsageError
from engine.resolve import check

PROGRAM = "from engine.data.look import main; main()"


@dataclass(frozen=True)
class Images:
    """Images of the training and the validation part."""

    train: int
    val: int


def count_images(config: Config) -> Images:
    """Raises UsageError where the data cannot be used."""
    source = open_early(config)
    if source is None:
        return Images(*IMAGE_SETS[config.data.dataset].counts)
    return Images(source.count("train"), source.count("val"))


def main() -> None:
    """A config as JSON on standard input; its images, or what is wrong with them, as JSON on standard output."""
    try:
        images = count_images(check(json.load(sys.stdin)))
        print(json.dumps({"train": images.train, "val": images.val}))
    except UsageError as error:
        print(json.dumps({"problems": [[problem.where, problem.what] for problem in error.problems]}))


class DataLook:
    """A look at the data of one config."""

    def __init__(self, config: Config) -> None:
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._text = json.dumps({"data": config.data.model_dump(mode="json"), "run": {"seed": config.run.seed}})

    def wait(self) -> Images | None:
        """The images; None where the look was given up. Raises UsageError where the data cannot be used."""
        try:
            output, _ = self._process.communicate(self._text)
            told = json.loads(output)
        except (OSError, ValueError):
            return None
        if "problems" in told:
            raise UsageError([Problem(where, what) for where, what in told["problems"]])
        return Images(told["train"], told["val"])

    def give_up(self) -> None:
        self._process.kill()

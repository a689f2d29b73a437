"""Proof of an export: run the written file on validation images, and compare its predictions with `gputrain predict`.

Called by `engine.train.inference.export`. Image files go through the text of preprocess.py, so that it is proved too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from engine.base.codec import finite, read_record
from engine.base.errors import Problem, UsageError
from engine.base.text import pluralize
from engine.config.schema import Config
from engine.config.tasks import TaskFacts, task_facts
from engine.train.data.augment.batch_ops import convert_to_format
from engine.train.data.sources.base import EncodedSource, Images, ImageSource, UnreadableImageError
from engine.train.data.sources.image import read_image
from engine.train.data.sources.open import open_source
from engine.train.inference.evaluate import evaluation_config, evaluation_trust
from engine.train.inference.export_program import load_export
from engine.train.inference.model_json import ModelDescription, StoredProof
from engine.train.inference.preprocess_script import load_function
from engine.train.inference.trained_model import TrainedCheckpoint, TrainedModel
from engine.train.loop.tasks.base import Task

DEFAULT_IMAGES = 512
BATCH_SIZE = 32
# An evaluation may change them, but an export is preprocessed as the run evaluates.
PREPROCESSING_KEYS = ("data.val_resize", "data.val_crop", "data.fit", "data.interpolation")


@dataclass
class Proof:
    """How an exported file agrees with `gputrain predict` on validation images.

    `same_class` are the images that get the same class, or one that is as likely, and with other tasks the same labels
    or numbers. `changes` says of each other one what it gets. `max_difference` is the greatest difference of a
    probability or number, `task` what is known of the task. `not_proved` says why no images were
    compared, and `fault` why the file cannot be used.
    """

    task: TaskFacts
    images: int = 0
    same_class: int = 0
    max_difference: float = 0.0
    changes: list[str] = field(default_factory=list)
    not_proved: Problem | None = None
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; also if no images were compared."""
        return not self.changes and not self.fault

    def describe(self, file_name: str) -> str:
        """Return what was compared, and what is wrong, as sentences."""
        if self.fault:
            return f"{file_name} cannot be used: {self.fault}."
        if not self.images:
            return f"{file_name} was not compared with `gputrain predict`: {self.not_proved}."
        text = (
            f"{file_name} was compared with `gputrain predict` on {pluralize(self.images, 'validation image')}: "
            f"{self.same_class} of {self.images} get the same {self.task.predicted}, "
            f"and a {self.task.value} differs by at most {self.max_difference:.2g}."
        )
        return f"{text} Another prediction is {self.changes[0]}." if self.changes else text

    def to_record(self) -> StoredProof:
        """Return the proof as it is in model.json."""
        return StoredProof(
            passed=self.passed,
            images=self.images,
            same_class=self.same_class,
            max_difference=finite(self.max_difference),
        )


def prove_export(
    trained: TrainedModel, folder: Path, file_name: str, overrides: Sequence[str] = (), max_images: int = DEFAULT_IMAGES
) -> Proof:
    """Compare the exported file `file_name`, beside its model.json and preprocess.py in a folder, with a model.

    `overrides` are `data.key=value` as for an evaluation, `max_images` is the number of validation images. Raises
    UsageError for invalid overrides; data that cannot be read is a reason in the result.
    """
    checkpoint, proof = trained.checkpoint, Proof(task_facts(trained.checkpoint.config))
    config, trust = proof_config(checkpoint, overrides), evaluation_trust(checkpoint, overrides)
    if max_images == 0:
        proof.not_proved = Problem("", "no images were requested", code="not-proved")
        return proof
    try:
        trust.check(config, ("data.dataset",))
        images = _validation_images(open_source(config), trained, folder / "preprocess.py", max_images)
        first = next(images, None)
    except UsageError as error:
        proof.not_proved = error.problems[0]
        return proof
    if first is None:
        proof.not_proved = Problem("", "no validation image can be read", code="bad-image")
        return proof
    try:
        description = read_record(folder / "model.json", ModelDescription)
        predict, classes = load_export(folder / file_name, description, checkpoint)
        batch = [first, *islice(images, BATCH_SIZE - 1)]
        while batch:
            expected = trained.probabilities(torch.from_numpy(np.stack([pixels for pixels, _ in batch]))).numpy()
            actual = predict(np.stack([pixels for _, pixels in batch]))
            proof.max_difference = max(proof.max_difference, float(np.abs(expected - actual).max()))
            for wanted, found in zip(expected, actual, strict=True):
                _compare(proof, trained.task, wanted, found, classes)
            batch = list(islice(images, BATCH_SIZE))
    except UsageError:
        raise
    except Exception as error:
        # The libraries raise many types for a file that is damaged, or does not fit its input.
        proof.fault = str(error).partition("\n")[0] or type(error).__name__
    return proof


def proof_config(checkpoint: TrainedCheckpoint, overrides: Sequence[str]) -> Config:
    """Return the config of the data that an export is checked with. Raises UsageError for invalid overrides."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key.partition(".")[0] != "data":
            raise UsageError.one(key, "cannot be changed for an export; only keys of data can", code="fixed-value")
        if key in PREPROCESSING_KEYS:
            raise UsageError.one(
                key, "cannot be changed for an export: it is that of the run; omit it", code="fixed-value"
            )
    return evaluation_config(checkpoint, overrides)


def _validation_images(
    source: ImageSource, trained: TrainedModel, script: Path, max_images: int
) -> Iterator[tuple[Images, Images]]:
    """Yield evenly spaced validation images, which covers all classes of a folder, as `gputrain predict` and as
    preprocess.py read them, C x H x W uint8. Those that are unreadable are skipped."""
    load, image_format = load_function(script.read_text()), trained.checkpoint.image_format
    count = source.num_images("val")
    for index in np.unique(np.linspace(0, count - 1, min(count, max_images)).round().astype(np.int64)).tolist():
        try:
            if isinstance(source, EncodedSource):
                with TemporaryDirectory(prefix="gputrain-export-") as folder:
                    # Without the name from the dataset, which others may have chosen.
                    path = Path(folder, "image")
                    path.write_bytes(source.read_encoded("val", index))
                    yield read_image(path, image_format), load(path)
            else:
                images, _ = source.load("val", np.array([index]))
                if source.in_memory:
                    images = convert_to_format(torch.from_numpy(images), image_format).numpy()
                yield images[0], images[0]
        except UnreadableImageError:
            continue


def _compare(
    proof: Proof,
    task: Task,
    wanted: NDArray[np.float32],
    found: NDArray[np.float32],
    names: Sequence[str],
) -> None:
    """Compare the outputs that `gputrain predict` (`wanted`) and the exported file (`found`) give for an image. `names`
    are those of the classes in that file."""
    proof.images += 1
    if tuple(names) == task.classes and task.agrees(wanted, found):
        proof.same_class += 1
    else:
        proof.changes.append(f"{task.describe(found, names)} instead of {task.describe(wanted, task.classes)}")

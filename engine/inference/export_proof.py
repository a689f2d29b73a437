"""Proof of an export: run the written file on validation images, and compare it with `gputrain predict`.

Called by `engine.inference.export`. Image files go through the text of preprocess.py, so that it is proved too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.schema import Config
from engine.data.augment.batch_ops import convert_to_format
from engine.data.sources.base import ImageFormat, Images, ImageSource, UnreadableImageError
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.folder import FolderSource
from engine.data.sources.image import read_image
from engine.data.sources.open import open_source
from engine.inference.evaluate import evaluation_config, evaluation_trust
from engine.inference.export_program import LoadedExport, load_export
from engine.inference.export_samples import write_sample_images
from engine.inference.model_json import ClassChange, ModelDescription, StoredProblem, StoredProof
from engine.inference.preprocess_script import load_function
from engine.inference.trained_model import TrainedCheckpoint, TrainedModel
from engine.utils.codec import decode, encode, finite, read_record
from engine.utils.errors import Problem, UsageError
from engine.utils.text import pluralize

DEFAULT_IMAGES = 512
BATCH_SIZE = 32
# Two classes that are closer than this can change places by the rounding of another library.
TIE_MARGIN = 1e-4
# The same input through two libraries: float32 rounding reaches 1e-5 in deep networks.
MAX_PROGRAM_DIFFERENCE = 1e-3
# Pillow and torch round differently when they resize.
MAX_PIXEL_DIFFERENCE = 2
# An evaluation may change them, but an export is preprocessed as the run evaluates.
PREPROCESSING_KEYS = ("data.val_resize", "data.val_crop", "data.fit", "data.interpolation")
NOT_REQUESTED = Problem("", "no images were requested", code="not-proved")
MAX_STORED_CHANGES = 20


class BrokenExportError(Exception):
    """An exported file was loaded, but cannot be run. The message is the reason."""


@dataclass
class Proof:
    """How an exported file agrees with `gputrain predict` on validation images.

    `ties` are images with another class whose two best classes differ by at most TIE_MARGIN, `changes` the others.
    `max_difference` is the greatest difference of a probability from image to class, `max_program_difference` that for
    the same pixels, and `max_pixel_difference` that of a pixel, also in `samples` images of unusual kinds. `files` says
    whether image files were read by preprocess.py. `not_proved` says why no images were compared, and `faults` what is
    wrong with the export.
    """

    images: int = 0
    same_class: int = 0
    ties: int = 0
    max_difference: float = 0.0
    max_program_difference: float = 0.0
    max_pixel_difference: int = 0
    files: bool = False
    samples: int = 0
    unread: int = 0
    changes: list[ClassChange] = field(default_factory=list)
    not_proved: Problem | None = None
    faults: list[Problem] = field(default_factory=list)

    def add_fault(self, text: str, *, code: str) -> None:
        """Add something that is wrong with the export."""
        self.faults.append(Problem("", text, code=code))

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; also if no images were compared."""
        return not self.faults

    def describe(self, file_name: str, format_code: Callable[[str], str] = str) -> str:
        """Return what was compared, and what is wrong, as sentences. `format_code` quotes the messages."""
        faults = [f"{format_code(str(fault))}." for fault in self.faults]
        if not self.images:
            reasons = [f"{format_code(str(self.not_proved))}."] if self.not_proved is not None else []
            return " ".join([f"{file_name} was not compared with `gputrain predict`:", *reasons, *faults])
        through = " through preprocess.py" if self.files else ""
        text = (
            f"{file_name} was compared with `gputrain predict` on {pluralize(self.images, 'validation image')}"
            f"{through}: {self.same_class} of {self.images} get the same class, and a probability differs by at most "
            f"{self.max_difference:.2g}."
        )
        if self.ties:
            text += f" The two best classes of the other {pluralize(self.ties, 'image')} are almost equally likely."
        return " ".join([text, *faults])

    def to_record(self) -> StoredProof:
        """Return the proof as it is in model.json."""
        return StoredProof(
            passed=self.passed,
            top1_agreement=self.same_class / self.images if self.images else None,
            another_class=len(self.changes),
            images=self.images,
            same_class=self.same_class,
            ties=self.ties,
            max_difference=finite(self.max_difference),
            max_program_difference=finite(self.max_program_difference),
            max_pixel_difference=self.max_pixel_difference,
            files=self.files,
            samples=self.samples,
            unread=self.unread,
            changes=tuple(self.changes[:MAX_STORED_CHANGES]),
            not_proved=None if self.not_proved is None else _stored_problem(self.not_proved),
            faults=tuple(map(_stored_problem, self.faults)),
        )


@dataclass(frozen=True)
class _ValidationImage:
    """An image as `gputrain predict` and as preprocess.py read it, C x H x W uint8."""

    name: str
    expected: Images
    exported: Images


def prove_export(
    trained: TrainedModel, folder: Path, file_name: str, overrides: Sequence[str] = (), max_images: int = DEFAULT_IMAGES
) -> Proof:
    """Compare the exported file `file_name`, beside its model.json and preprocess.py in a folder, with a model.

    `overrides` are `data.key=value` as for an evaluation, `max_images` is the number of validation images. Raises
    UsageError for invalid overrides; data that cannot be read is a reason in the result.
    """
    checkpoint = trained.checkpoint
    config = proof_config(checkpoint, overrides)
    trust = evaluation_trust(checkpoint, overrides)
    description = read_record(folder / "model.json", ModelDescription)
    load = load_function((folder / "preprocess.py").read_text())
    proof = Proof()
    try:
        exported = load_export(folder / file_name, description, checkpoint)
    except UsageError:
        raise
    except Exception as error:
        # The libraries raise many types for a damaged file.
        proof.add_fault(f"{file_name} cannot be loaded: {_first_line(error)}", code="damaged")
        return proof
    # As in the file: names that are not UTF-8 are escaped.
    classes = decode(encode(checkpoint.classes), list[str])
    if not classes == exported.classes == list(description.classes):
        proof.add_fault(f"{file_name} has other class names than the run", code="conflict")
    _compare_samples(proof, load, checkpoint.image_format)
    if max_images == 0:
        proof.not_proved = NOT_REQUESTED
        _find_faults(proof, file_name)
        return proof
    try:
        trust.check(config, ("data.dataset",))
        source = open_source(config)
        images = _validation_images(source, checkpoint.image_format, load, max_images, proof)
        while batch := list(islice(images, BATCH_SIZE)):
            _compare_batch(proof, trained, exported, batch)
    except UsageError as error:
        proof.not_proved = error.problems[0]
    except BrokenExportError as error:
        proof.add_fault(f"{file_name} cannot be run: {error}", code="library-failed")
        return proof
    if not proof.images and proof.not_proved is None:
        proof.not_proved = Problem("", "no validation image can be read", code="bad-image")
    _find_faults(proof, file_name)
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
    source: ImageSource, image_format: ImageFormat, load: Callable[[Path], Images], max_images: int, proof: Proof
) -> Iterator[_ValidationImage]:
    """Yield evenly spaced validation images, which covers all classes of a folder; count those that are unreadable."""
    count = source.num_images("val")
    for index in np.unique(np.linspace(0, count - 1, min(count, max_images)).round().astype(np.int64)).tolist():
        try:
            if isinstance(source, EncodedSource):
                proof.files = True
                with _image_file(source, index) as (path, name):
                    expected = read_image(path, image_format)
                    exported = _load(load, path, expected, proof)
                yield _ValidationImage(name, expected, exported)
            else:
                images, _ = source.load("val", np.array([index]))
                if source.in_memory:
                    images = convert_to_format(torch.from_numpy(images), image_format).numpy()
                pixels = images[0]
                yield _ValidationImage(f"validation image {index}", pixels, pixels)
        except UnreadableImageError:
            proof.unread += 1


@contextmanager
def _image_file(source: EncodedSource, index: int) -> Iterator[tuple[Path, str]]:
    """Yield a file of a validation image, a temporary one if the source is no folder, and its name in messages.

    Raises UnreadableImageError."""
    if isinstance(source, FolderSource):
        path = Path(source.root, source.paths["val"][index])
        yield path, str(path)
        return
    encoded = source.read_encoded("val", index)
    with TemporaryDirectory(prefix="gputrain-export-") as folder:
        # Without the name from the dataset, which others may have chosen.
        path = Path(folder, "image")
        path.write_bytes(encoded.data)
        yield path, encoded.name()


def _compare_samples(proof: Proof, load: Callable[[Path], Images], image_format: ImageFormat) -> None:
    """Compare preprocess.py with `read_image` on images of unusual kinds, which a validation set need not contain."""
    with TemporaryDirectory(prefix="gputrain-export-") as folder:
        for path in write_sample_images(Path(folder)):
            _load(load, path, read_image(path, image_format), proof)
            proof.samples += 1


def _load(load: Callable[[Path], Images], path: Path, expected: Images, proof: Proof) -> Images:
    """Return an image as preprocess.py reads it, and compare its pixels. Counts a failure as black pixels."""
    try:
        pixels = load(path)
    except Exception as error:
        # Decoders raise arbitrary exceptions.
        reason = str(error) or type(error).__name__
        proof.add_fault(f"preprocess.py cannot read {path.name}: {reason}", code="bad-image")
        return np.zeros_like(expected)
    if pixels.shape != expected.shape or pixels.dtype != np.uint8:
        text = f"preprocess.py returns {pixels.dtype} of shape {pixels.shape}, not {expected.shape}"
        proof.add_fault(text, code="export-differs")
        return np.zeros_like(expected)
    difference = int(np.abs(pixels.astype(np.int16) - expected).max())
    proof.max_pixel_difference = max(proof.max_pixel_difference, difference)
    return pixels


def _compare_batch(
    proof: Proof, trained: TrainedModel, exported: LoadedExport, batch: Sequence[_ValidationImage]
) -> None:
    """Add the predictions of a batch to the proof. Raises BrokenExportError."""
    pixels = np.stack([image.expected for image in batch])
    expected = trained.probabilities(torch.from_numpy(pixels)).numpy()
    actual = _run(exported, np.stack([image.exported for image in batch]))
    if actual.shape != expected.shape:
        proof.add_fault(f"the output has the shape {actual.shape}, not {expected.shape}", code="export-differs")
        return
    proof.images += len(batch)
    proof.max_difference = max(proof.max_difference, _greatest_difference(expected, actual))
    same_pixels = [np.array_equal(image.expected, image.exported) for image in batch]
    program = actual if all(same_pixels) else _run(exported, pixels)
    proof.max_program_difference = max(proof.max_program_difference, _greatest_difference(expected, program))
    for image, wanted, found in zip(batch, expected, actual, strict=True):
        first, second = np.sort(wanted)[::-1][:2]
        best, other = int(wanted.argmax()), int(found.argmax())
        names = trained.checkpoint.classes[best], exported.classes[other] if other < len(exported.classes) else ""
        if names[0] == names[1]:
            proof.same_class += 1
        elif first - second <= TIE_MARGIN:
            proof.ties += 1
        else:
            change = ClassChange(
                image=image.name,
                expected=names[0],
                expected_probability=finite(float(wanted[best])),
                exported=names[1],
                exported_probability=finite(float(found[other])),
            )
            proof.changes.append(change)


def _run(exported: LoadedExport, pixels: Images) -> NDArray[np.float32]:
    """Return the probabilities of an exported file. Raises BrokenExportError."""
    try:
        return exported.predict(pixels)
    except Exception as error:
        # The libraries raise many types for a program that does not fit its input.
        raise BrokenExportError(_first_line(error)) from error


def _stored_problem(problem: Problem) -> StoredProblem:
    return StoredProblem(code=problem.code, message=str(problem))


def _shown(probability: float | None) -> str:
    return "nan" if probability is None else f"{probability:.4f}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _greatest_difference(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    """Return the greatest difference of a probability; infinity if one of them alone is not finite."""
    difference = np.abs(expected.astype(np.float64) - actual)
    difference[np.isnan(expected) & np.isnan(actual)] = 0.0
    return float(np.nan_to_num(difference, nan=math.inf).max())


def _find_faults(proof: Proof, file_name: str) -> None:
    """Add what the comparison says is wrong."""
    if proof.changes:
        change, count = proof.changes[0], pluralize(len(proof.changes), "image")
        proof.add_fault(
            f"{file_name} gives {count} of {proof.images} another class than `gputrain predict`, such as "
            f"{change.image}: {change.exported} ({_shown(change.exported_probability)}) instead of {change.expected} "
            f"({_shown(change.expected_probability)})",
            code="export-differs",
        )
    if proof.max_program_difference > MAX_PROGRAM_DIFFERENCE:
        proof.add_fault(
            f"{file_name} gives the same pixels another probability: it differs by up to "
            f"{proof.max_program_difference:.2g}",
            code="export-differs",
        )
    if proof.max_pixel_difference > MAX_PIXEL_DIFFERENCE:
        proof.add_fault(
            f"preprocess.py reads images differently: pixels differ by up to {proof.max_pixel_difference} of 255",
            code="export-differs",
        )

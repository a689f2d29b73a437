"""Export of a trained model for other programs: the model in one of three formats, and what they need to use it.

Called by `gputrain export`. `engine.train.models.transfer` loads an exported safetensors file as pretrained weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from engine.base.codec import InvalidRecordError, read_record, replace, write_record
from engine.base.errors import UsageError
from engine.base.files import fsync_folder, replace_file
from engine.config.monitor import monitored_name
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.train.inference.export_program import INPUT_NAME, MODEL_FILES, output_name, write_model_file
from engine.train.inference.export_proof import DEFAULT_IMAGES, Proof, proof_config, prove_export
from engine.train.inference.model_card import model_card
from engine.train.inference.model_json import (
    Architecture,
    ExportedFile,
    ExportedTask,
    ExportFormat,
    InputImage,
    ModelDescription,
    TensorDescription,
)
from engine.train.inference.preprocess_script import preprocess_script
from engine.train.inference.trained_model import (
    TrainedCheckpoint,
    TrainedModel,
    build_trained_model,
    check_takes_images,
    find_epoch,
)
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.table import build_task

DESCRIPTION_FILE, SCRIPT_FILE, CARD_FILE = "model.json", "preprocess.py", "README.md"


def export_model(
    checkpoint: TrainedCheckpoint,
    run: RunFolder,
    folder: Path,
    file_format: ExportFormat = "safetensors",
    *,
    force: bool = False,
    overrides: Sequence[str] = (),
    max_images: int = DEFAULT_IMAGES,
) -> tuple[list[Path], Proof]:
    """Write the model, preprocess.py, model.json and README.md to `folder`, and check the model. Return the paths of
    the files, the model first, and how it agrees with `gputrain predict`.

    Without `force`, only files of an earlier export of the same run are replaced. `overrides` are `data.key=value`: the
    validation images that the file is checked with, at most `max_images`.

    The files are written and checked in a temporary folder, and then replace earlier ones, each atomically. Raises
    UsageError if the model cannot be exported in this format, if `folder` contains other files of these names, or if it
    cannot be written to.
    """
    check_takes_images(checkpoint)
    proof_config(checkpoint, overrides)
    file_name = MODEL_FILES[file_format]
    history = run.history()
    task = build_task(checkpoint.config, checkpoint.classes, torch.device("cpu"), state=checkpoint.task_state)
    description = describe_model(checkpoint, run, history, task)
    try:
        files = _kept_files(folder, description, file_name, force=force)
        # Building the model checks that the weights match it before anything is written.
        trained = build_trained_model(checkpoint, "cpu")
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".export.", dir=folder, ignore_cleanup_errors=True) as created:
            staging = Path(created)
            _write_files(trained, staging, description, file_format)
            proof = prove_export(trained, staging, file_name, overrides, max_images)
            files[file_name] = _describe_file(staging / file_name, file_format, description, proof)
            description = replace(description, files=files)
            card = model_card(checkpoint, description, proof, file_name, task)
            replace_file(staging / CARD_FILE, lambda file: file.write(card.encode()), durable=True)
            write_record(staging / DESCRIPTION_FILE, description)
            names = (file_name, SCRIPT_FILE, DESCRIPTION_FILE, CARD_FILE)
            for other in set(MODEL_FILES.values()) - set(files):
                (folder / other).unlink(missing_ok=True)
            for name in names:
                (staging / name).replace(folder / name)
            fsync_folder(folder)
    except OSError as error:
        raise UsageError.one(
            str(folder), f"cannot be written to: {error.strerror or error}", code="not-writable"
        ) from error
    return [folder / name for name in names], proof


def _write_files(
    trained: TrainedModel, staging: Path, description: ModelDescription, file_format: ExportFormat
) -> None:
    """Write the model, preprocess.py and a first model.json, to check them."""
    write_model_file(trained, file_format, staging / MODEL_FILES[file_format], description)
    script = preprocess_script(trained.checkpoint.image_format)
    replace_file(staging / SCRIPT_FILE, lambda file: file.write(script.encode()), durable=True)
    write_record(staging / DESCRIPTION_FILE, description)


def _describe_file(path: Path, file_format: ExportFormat, description: ModelDescription, proof: Proof) -> ExportedFile:
    """Return what model.json says about a file of the model."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    image, is_program = description.image, file_format != "safetensors"
    return ExportedFile(
        format=file_format,
        input=TensorDescription(
            name=INPUT_NAME,
            dtype="uint8" if is_program else "float32",
            shape=("batch", image.channels, image.size, image.size),
        ),
        output=TensorDescription(
            name=output_name(description) if is_program else "logits",
            dtype="float32",
            shape=("batch", len(description.classes)),
        ),
        sha256=digest,
        proof=proof.to_record(),
    )


def _kept_files(folder: Path, description: ModelDescription, file_name: str, *, force: bool) -> dict[str, ExportedFile]:
    """Return what model.json says about the files of other formats that an earlier export of the same weights left.

    Raises UsageError if `folder` has files that were not exported from this run, unless `force`.
    """
    try:
        previous = read_record(folder / DESCRIPTION_FILE, ModelDescription)
    except (OSError, InvalidRecordError):
        previous = None
    names = (*MODEL_FILES.values(), DESCRIPTION_FILE, SCRIPT_FILE, CARD_FILE)
    existing = [name for name in names if (folder / name).exists()]
    if existing and not force and (previous is None or previous.run != description.run):
        reason = f"was not exported from {description.run}"
        advice = "set another --output, or overwrite with --force"
        raise UsageError.one(str(folder / existing[0]), reason, advice, code="name-in-use")
    if previous is None or previous.weights_sha256 != description.weights_sha256:
        return {}
    return {name: file for name, file in previous.files.items() if name in existing and name != file_name}


def describe_model(checkpoint: TrainedCheckpoint, run: RunFolder, history: History, task: Task) -> ModelDescription:
    """Return what model.json says about the model, without its files."""
    model, images = checkpoint.config.model, checkpoint.image_format
    epoch = find_epoch(checkpoint, history)
    scores = None if epoch is None else epoch.ema if checkpoint.ema else epoch.val
    return ModelDescription(
        gputrain=version("gputrain"),
        run=run.name,
        checkpoint=checkpoint.path.name,
        step=checkpoint.step,
        epoch=None if epoch is None else epoch.epoch,
        val_accuracy=None if scores is None else scores.accuracy,
        val_metrics={} if scores is None else scores.metrics,
        monitor=monitored_name(checkpoint.config),
        monitor_value=None if scores is None else scores.value(monitored_name(checkpoint.config)),
        ema=checkpoint.ema,
        weights_sha256=hash_weights(checkpoint.weights),
        model=Architecture(source=model.source, name=model.name, options=model.options),
        classes=tuple(checkpoint.classes),
        image=InputImage(size=images.val_size, channels=images.channels, mean=images.mean, std=images.std),
        tta=checkpoint.config.eval.tta,
        task=ExportedTask(
            name=checkpoint.config.task.name, **{key: tuple(numbers) for key, numbers in task.state.items()}
        ),
        output=task.activation,
    )


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

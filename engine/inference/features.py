"""Extraction of the features that one layer of a trained model computes for the images of a folder.

Called by `gputrain predict --features`. Images are read as in `engine.inference.predict`. The result is an .npz file
that `numpy.load` reads without pickle:

    features    float32, one row per image
    paths       path of each image, relative to the folder
    labels      int64, index into `classes`, -1 for an image that is in no class folder
    classes     names of the class folders, sorted
    layer       path of the layer in the model
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from engine.data.sources.base import Images
from engine.data.sources.folder_layout import PART_NAMES
from engine.inference.predict import BATCH_SIZE, InputFile, read_batches
from engine.inference.trained_model import TrainedModel, check_takes_images
from engine.models.summary import feature_maps, first_shape, tensors_in, trace_model
from engine.utils.errors import Problem, UsageError, did_you_mean
from engine.utils.files import replace_file, shown_path
from engine.utils.text import list_names
from engine.utils.units import format_bytes

COPY_BYTES = 1 << 20
MAX_LISTED_STAGES = 12


@dataclass(frozen=True)
class ExtractedFeatures:
    """What was written: the layer, the shape of the array, the classes, and how many images could not be read."""

    layer: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    unread: int


def extract_features(
    model: TrainedModel,
    folder: Path,
    files: Sequence[InputFile],
    target: Path,
    *,
    layer: str | None = None,
    pool: bool = True,
    report: Callable[[InputFile, Problem], None] = lambda file, error: None,
) -> ExtractedFeatures:
    """Write the output of a layer for each image to `target`, in batches and atomically.

    Without `layer`, it is the last stage of `gputrain models show --stages`. With `pool`, an output is averaged over
    its pixels or tokens. `report` receives each file that is no readable image. Raises UsageError for an unknown layer,
    for a model that takes no images, without readable images, and if memory or disk do not suffice.
    """
    check_takes_images(model.checkpoint)
    name = find_layer(model, layer)
    try:
        with TemporaryFile(dir=target.parent) as rows_file:
            readable, row_shape = _write_rows(_batches(model, name, files, pool, report), rows_file, target, len(files))
            paths = [file.relative_to(folder) for file in readable]
            labels, classes = folder_labels(paths)
            shape = (len(paths), *row_shape)
            arrays = {
                "paths": np.array(list(map(str, paths))),
                "labels": np.array(labels, np.int64),
                "classes": np.array(classes, np.str_),
                "layer": np.array(name),
            }
            replace_file(target, lambda file: _write_npz(file, shape, rows_file, arrays), durable=True)
    except OSError as error:
        raise UsageError.one(
            str(shown_path(target)), f"cannot be written: {error.strerror or error}", code="not-writable"
        ) from error
    return ExtractedFeatures(name, shape, tuple(classes), len(files) - len(paths))


def find_layer(model: TrainedModel, layer: str | None) -> str:
    """Return the path of the layer, by default that of the last stage. Raises UsageError."""
    modules = dict(model.model.named_modules())
    if layer is not None and layer in modules and layer:
        return layer
    stages = _stages(model)
    listed = f"the stages are {list_names(stages, MAX_LISTED_STAGES)}" if stages else "it has no stages"
    name = model.checkpoint.config.model.name
    if layer is not None:
        hint = did_you_mean(layer, modules)
        advice = f"{listed}; `gputrain models show` lists all layers"
        raise UsageError.one("--features", f"{name} has no layer {layer!r}{hint}", advice, code="not-found")
    if not stages:
        advice = "name a layer that `gputrain models show` lists"
        raise UsageError.one("--features", f"{name} has no feature maps", advice, code="missing-value")
    return stages[-1]


def _stages(model: TrainedModel) -> list[str]:
    inputs = model.prepare(torch.zeros(1, *model.input_shape, dtype=torch.uint8))
    trace = trace_model(model.model, inputs)
    return [feature.path for feature in feature_maps(trace.calls, tuple(inputs.shape))]


def _batches(
    model: TrainedModel,
    layer: str,
    files: Sequence[InputFile],
    pool: bool,
    report: Callable[[InputFile, Problem], None],
) -> Iterator[tuple[list[Path], np.ndarray[Any, Any]]]:
    """Yield the files of a batch that are readable, and the output of the layer for each. Raises UsageError."""
    image_format, outputs = model.checkpoint.image_format, list[Tensor]()
    module: nn.Module = model.model.get_submodule(layer)

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = tensors_in(output)
        outputs[:] = tensors[:1]

    handle = module.register_forward_hook(keep)
    try:
        for batch in read_batches(files, image_format):
            images: dict[Path, Images] = {}
            for file, result in batch:
                if isinstance(result, Problem):
                    report(file, result)
                else:
                    images[file.path] = result
            if not images:
                continue
            outputs.clear()
            with torch.inference_mode():
                model.model(model.prepare(torch.from_numpy(np.stack(list(images.values())))))
                features = _checked_output(outputs, layer, len(images))
                values = (average_positions(features) if pool else features).float().cpu().contiguous().numpy()
            yield list(images), values
    except torch.OutOfMemoryError as error:
        reason = f"a batch of {BATCH_SIZE} images does not fit into the memory of {model.device}"
        raise UsageError.one("--gpus", reason, "use --gpus cpu", code="out-of-memory") from error
    finally:
        handle.remove()


def _checked_output(outputs: Sequence[Tensor], layer: str, batch_size: int) -> Tensor:
    """Return the output of the layer, one entry per image. Raises UsageError."""
    shape = first_shape(list(outputs))
    if shape is None:
        raise UsageError.one(
            "--features", f"{layer} returned no tensor or was not called", "choose another layer", code="not-supported"
        )
    if not shape or shape[0] != batch_size:
        raise UsageError.one(
            "--features",
            f"the output of {layer} has shape {shape} instead of one entry per image",
            "choose another layer",
            code="not-supported",
        )
    return outputs[0]


def average_positions(features: Tensor) -> Tensor:
    """Average N x C x H x W, N x H x W x C and N x L x C over pixels or tokens; other shapes are flattened to rows."""
    if features.ndim == 4:
        has_channels_last = features.shape[1] == features.shape[2] != features.shape[3]
        return features.float().mean((1, 2) if has_channels_last else (2, 3))
    return features.float().mean(1) if features.ndim == 3 else features.flatten(1) if features.ndim > 1 else features


def folder_labels(paths: Sequence[Path]) -> tuple[list[int], list[str]]:
    """Return the label of each relative path, -1 without a class folder, and the sorted names of the class folders.

    The class folder is the outermost folder, or the one below if the outermost ones are named like parts of a dataset.
    """
    outer = {path.parts[0] for path in paths if len(path.parts) > 1}
    depth = 1 if outer and {name.casefold() for name in outer} <= PART_NAMES.keys() else 0
    names = [path.parts[depth] if len(path.parts) > depth + 1 else None for path in paths]
    classes = sorted({name for name in names if name is not None})
    index = {name: number for number, name in enumerate(classes)}
    return [-1 if name is None else index[name] for name in names], classes


def _write_rows(
    batches: Iterator[tuple[list[Path], np.ndarray[Any, Any]]], file: BinaryIO, target: Path, num_files: int
) -> tuple[list[Path], tuple[int, ...]]:
    """Write the features as raw float32. Return the files of the rows, and the shape of a row.

    Raises UsageError and OSError."""
    files, shape = list[Path](), tuple[int, ...]()
    for readable, values in batches:
        if not files:
            shape = values.shape[1:]
            _check_disk(target, values[0].nbytes * num_files)
        file.write(values.data if values.size else b"")
        files += readable
    if not files:
        raise UsageError.one("PATH", "contains no readable image", code="no-images")
    return files, shape


def _check_disk(target: Path, size_bytes: int) -> None:
    """Raise UsageError if the disk has no space for the features twice: as rows, and in the file with all arrays."""
    free = shutil.disk_usage(target.parent).free
    if 2 * size_bytes > free:
        raise UsageError.one(
            str(shown_path(target)),
            f"the features have {format_bytes(size_bytes)} and need twice as much while they are written, but "
            f"{format_bytes(free)} are free",
            "omit --no-pool, choose a later layer, or write to another disk with --output",
            code="disk-full",
        )


def _write_npz(file: BinaryIO, shape: tuple[int, ...], rows: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write an uncompressed .npz file in the format of `numpy.savez`, and copy the features without loading them."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open("features.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array_header_1_0(entry, header)
            rows.seek(0)
            shutil.copyfileobj(rows, entry, COPY_BYTES)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)

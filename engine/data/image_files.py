"""Sizes and modes of image files from their headers, and the warning that training enlarges small images.

`engine.doctor.dataset` shows them, `engine.launch.preflight` warns before the start, and the diagnosis at the end of a
run (`engine.runs.bottleneck`) repeats the advice.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from engine.config.schema import Config
from engine.config.training_sections import BUILTIN_MODELS
from engine.config.user_code import is_user_code
from engine.data.sampler import Part
from engine.data.sources.base import EncodedSource, ImageSource
from engine.data.sources.image import open_image
from engine.utils.errors import Problem

# Files whose headers the warning reads: enough for the median, and few enough for each check of the form.
MEDIAN_FILES = 16
# Smaller images, as a share of the input, are reported: most pixels that the network computes on are interpolated.
MIN_INPUT_SHARE = 0.5
# Networks of torchvision and timm halve the image five times, and patches of transformers divide it.
LIBRARY_SIZE_STEP = 32


@dataclass(frozen=True)
class ImageFiles:
    """Sizes and modes of image files, from the headers of `examined` evenly spaced files.

    `sizes` are the smallest, the median and the largest width and height in pixels, as stored. `modes` counts format
    and Pillow mode.
    """

    examined: int
    sizes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    modes: dict[str, int]


def examine_files(source: EncodedSource, max_files: int) -> ImageFiles | None:
    """Read the headers of up to `max_files` files; None if none is readable."""
    num_train = source.num_images("train")
    count = num_train + source.num_images("val")
    chosen = np.unique(np.linspace(0, count - 1, min(count, max_files)).round().astype(np.int64))
    sizes: list[tuple[int, int]] = []
    modes: Counter[str] = Counter()
    for index in chosen.tolist():
        part: Part = "train" if index < num_train else "val"
        position = index if part == "train" else index - num_train
        # A file that became unreadable after the scan; training reports it. Decoders raise arbitrary exceptions.
        with suppress(Exception), open_image(source.read_encoded(part, position)) as image:
            sizes.append(image.size)
            modes[f"{image.format} {image.mode}"] += 1
    if not sizes:
        return None
    sizes.sort(key=lambda size: size[0] * size[1])
    return ImageFiles(len(sizes), (sizes[0], sizes[len(sizes) // 2], sizes[-1]), dict(modes.most_common()))


def enlarged_edge(config: Config, source: ImageSource) -> int:
    """Return the shorter edge in pixels of the median image file, if the default input is more than twice as large.

    Else 0: also for a size that the user or the pretrained weights set, and for data without image files."""
    if config.data.image_size is not None or config.data.size_schedule or not isinstance(source, EncodedSource):
        return 0
    files = examine_files(source, MEDIAN_FILES)
    edge = 0 if files is None else min(files.sizes[1])
    return edge if edge < MIN_INPUT_SHARE * source.format.size else 0


def fitting_size(config: Config, edge: int) -> int:
    """Return the `data.image_size` to advise for images with this shorter edge, which the model can take."""
    model = config.model
    if is_user_code(model.name) or (model.source in ("auto", "builtin") and model.name in BUILTIN_MODELS):
        return edge
    return -(-edge // LIBRARY_SIZE_STEP) * LIBRARY_SIZE_STEP


def small_image_warnings(config: Config, source: ImageSource) -> list[Problem]:
    """Return a warning if training would enlarge most images to more than twice their size."""
    edge, size = enlarged_edge(config, source), source.format.size
    if not edge:
        return []
    return [
        Problem(
            "data.image_size",
            f"the images have about {edge} x {edge} pixels and are enlarged to {size} x {size}, the default",
            f"train faster with data.image_size={fitting_size(config, edge)}, or set {size} to keep this size",
            code="images-enlarged",
        )
    ]

"""Follow the steps of an exported model.json to the letter, as a stranger would, without code of gputrain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def follow_steps(path: Path, steps: list[dict[str, Any]]) -> NDArray[np.float32]:
    """Read an image as the steps of model.json say, without code of gputrain."""
    image, pixels = Image.open(path), np.empty(0, np.float32)
    for step in steps:
        match step["name"]:
            case "jpeg_luma":
                image.draft("L", None)
            case "exif_transpose":
                image = ImageOps.exif_transpose(image)
            case "scale_16_bit" if image.mode.startswith("I"):
                shades = np.asarray(image).astype(np.int64) // step["divide_by"]
                image = Image.fromarray(shades.clip(*step["clip"]).astype(np.uint8))
            case "composite" if image.mode in step["modes"] or "transparency" in image.info:
                image = image.convert("RGBA")
                background = Image.new("RGBA", image.size, (*step["background"], 255))
                image = Image.alpha_composite(background, image)
            case "convert":
                image = image.convert(step["mode"])
            case "resize":
                resampling = Image.Resampling[step["interpolation"].upper()]
                if step["box"] == "central_square":
                    side = min(image.size)
                    left, top = ((edge - side) // 2 for edge in image.size)
                    image = image.crop((left, top, left + side, top + side))
                shorter = min(image.size)
                longer_edges = [int(step.get("shorter_edge", 0) * edge / shorter) for edge in image.size]
                image = image.resize(step.get("size", longer_edges), resampling)
            case "center_crop":
                left, top = (round((edge - side) / 2) for edge, side in zip(image.size, step["size"], strict=True))
                image = image.crop((left, top, left + step["size"][0], top + step["size"][1]))
            case "to_array":
                pixels = np.array(image, np.float32).reshape(*step["shape"][1:], -1).transpose(2, 0, 1)
            case "divide":
                pixels = pixels / np.float32(step["by"])
            case "normalize":
                mean, std = (np.array(step[name], np.float32)[:, None, None] for name in ("mean", "std"))
                pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels)

"""The preprocessing of an exported model: the steps of model.json, and preprocess.py, on Pillow and NumPy alone.

Both describe `engine.data.sources.image.read_image` for one image format. `engine.inference.export_proof` compares the
script with it. `engine.inference.export` writes both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.data.sources.base import ImageFormat, Preprocessing
from engine.data.sources.image import ALPHA_MODES, SIXTEEN_BIT_DIVISOR, pil_mode

_SCRIPT = '''"""Read an image file as the input of an exported model: uint8, {channels} x {size} x {size}.

Needs only Pillow and NumPy. You may copy and change this file. `python preprocess.py photo.jpg` prints the shape.
"""

import sys

import numpy as np
from PIL import Image, ImageOps


def load(path):
    """Return an image as uint8 of shape ({channels}, {size}, {size}). `path` is a path or an open file."""
    image = Image.open(path)
{luma}    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels are not supported")
    if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow's convert() would clip at 255
        shades = np.asarray(image).astype(np.int64) // {divisor}
        image = Image.fromarray(shades.clip(0, 255).astype(np.uint8))
    if image.mode in {alpha_modes} or "transparency" in image.info:
        image = image.convert("RGBA")  # the color stored for a transparent pixel is arbitrary
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("{mode}")
{geometry}
    return {array}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, load(name).shape)
'''
_LUMA = """\
    image.draft("L", None)  # only the luma of a color JPEG
"""
_LUMA_STEP = {"name": "jpeg_luma", "text": "Decode a color JPEG to its luma (Pillow: image.draft('L', None))."}
_CENTRAL_SQUARE = """\
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side))
    image = image.resize(({size}, {size}), Image.Resampling.{filter})"""
_SQUASH = "    image = image.resize(({size}, {size}), Image.Resampling.{filter})"
_SHORTER_EDGE = """\
    shorter = min(image.size)
    width, height = (int({resize} * edge / shorter) for edge in image.size)
    image = image.resize((width, height), Image.Resampling.{filter})
    left, top = round((width - {size}) / 2), round((height - {size}) / 2)
    image = image.crop((left, top, left + {size}, top + {size}))"""
_SQUASH_AND_CROP = """\
    image = image.resize(({resize}, {resize}), Image.Resampling.{filter})
    image = image.crop(({offset}, {offset}, {offset} + {size}, {offset} + {size}))"""


def preprocess_script(image_format: ImageFormat) -> str:
    """Return the source of preprocess.py, whose function `load` does what `read_image` does."""
    steps, is_gray = image_format.preprocessing(training=False), image_format.channels == 1
    numbers = {"size": steps.size, "resize": steps.resize, "filter": steps.interpolation.upper()}
    numbers |= {"mode": pil_mode(image_format), "channels": image_format.channels}
    if steps.resize is None:
        geometry = _CENTRAL_SQUARE if steps.fit == "crop" else _SQUASH
    elif steps.fit == "crop":
        geometry = _SHORTER_EDGE
    else:
        geometry = _SQUASH_AND_CROP
        numbers |= {"offset": round((steps.resize - steps.size) / 2)}
    return _SCRIPT.format(
        **numbers,
        luma=_LUMA if is_gray else "",
        divisor=SIXTEEN_BIT_DIVISOR,
        alpha_modes=str(ALPHA_MODES).replace("'", '"'),
        geometry=geometry.format(**numbers),
        array="np.array(image)[None]" if is_gray else "np.ascontiguousarray(np.array(image).transpose(2, 0, 1))",
    )


def load_function(script: str) -> Callable[[Any], Any]:
    """Return the function `load` of a script that `preprocess_script` has written in this process."""
    names: dict[str, Any] = {"__name__": "preprocess"}
    exec(compile(script, "preprocess.py", "exec"), names)  # noqa: S102 - the text is our own
    load: Callable[[Any], Any] = names["load"]
    return load


def describe_transforms(image_format: ImageFormat) -> list[dict[str, Any]]:
    """Return the steps from image file to the input of the network, in order, each with a sentence for the reader."""
    steps, mode = image_format.preprocessing(training=False), pil_mode(image_format)
    size = steps.size
    return [
        *([_LUMA_STEP] if mode == "L" else []),
        {
            "name": "exif_transpose",
            "text": "Rotate and mirror the image as its EXIF orientation says (Pillow: ImageOps.exif_transpose).",
        },
        {
            "name": "scale_16_bit",
            "divide_by": SIXTEEN_BIT_DIVISOR,
            "clip": [0, 255],
            "text": "Divide the integers of a 16-bit grayscale image (Pillow: a mode that begins with I) by "
            f"{SIXTEEN_BIT_DIVISOR}, round down, and clip them to 0 to 255. Images of mode F are not supported.",
        },
        {
            "name": "composite",
            "background": [255, 255, 255],
            "modes": list(ALPHA_MODES),
            "text": f"Convert an image with transparency (mode {', '.join(ALPHA_MODES)}, or 'transparency' in "
            "image.info, as for a transparent color of a palette) to RGBA, and composite it on opaque white (Pillow: "
            "Image.alpha_composite).",
        },
        {
            "name": "convert",
            "mode": mode,
            "text": f"Convert any other mode, palettes included, to {mode} (Pillow: image.convert('{mode}')).",
        },
        *_describe_resize(steps),
        {
            "name": "to_array",
            "dtype": "uint8",
            "layout": "channels, height, width",
            "shape": [image_format.channels, size, size],
            "text": f"Arrange the pixels as uint8 of shape ({image_format.channels}, {size}, {size}). preprocess.py "
            "ends here.",
        },
        {"name": "divide", "by": 255, "text": "Divide by 255, in float32."},
        {
            "name": "normalize",
            "mean": list(image_format.mean),
            "std": list(image_format.std),
            "text": "Subtract the mean of each channel, and divide by its standard deviation.",
        },
    ]


def _describe_resize(steps: Preprocessing) -> list[dict[str, Any]]:
    """Return the steps from an upright image of any size to the square input."""
    size, resize, name = steps.size, steps.resize, steps.interpolation
    filter_text = (
        f"with the filter {name}{' and antialiasing' if name != 'nearest' else ''}, to integers of 0 to 255 (Pillow: "
        f"Image.Resampling.{name.upper()})"
    )
    step: dict[str, Any] = {"name": "resize", "interpolation": name, "antialias": name != "nearest"}
    if resize is None:
        is_crop = steps.fit == "crop"
        square = (
            "Crop the largest central square: side = min(width, height), left = (width - side) // 2, top = (height - "
            "side) // 2. Resize it"
            if is_crop
            else "Resize the whole image, without its aspect ratio,"
        )
        step |= {"box": "central_square" if is_crop else "whole_image", "size": [size, size]}
        return [step | {"text": f"{square} to {size} x {size} {filter_text}."}]
    if steps.fit == "crop":
        step |= {
            "box": "whole_image",
            "shorter_edge": resize,
            "text": f"Resize the whole image so that its shorter edge becomes {resize} pixels long and the longer edge "
            f"int({resize} * longer / shorter), {filter_text}.",
        }
    else:
        text = f"Resize the whole image, without its aspect ratio, to {resize} x {resize} {filter_text}."
        step |= {"box": "whole_image", "size": [resize, resize], "text": text}
    crop = {
        "name": "center_crop",
        "size": [size, size],
        "text": f"Crop the central {size} x {size} pixels: left = round((width - {size}) / 2), top = round((height - "
        f"{size}) / 2), where round() rounds halves to the even number.",
    }
    return [step, crop]

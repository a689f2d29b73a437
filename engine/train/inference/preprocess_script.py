"""The preprocessing of an exported model: preprocess.py, on Pillow and NumPy alone.

It does what `engine.train.data.sources.image.read_image` does for one image format.
`engine.train.inference.export_proof` compares the two, `engine.train.inference.export` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.image import ALPHA_MODES, SIXTEEN_BIT_DIVISOR

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
    numbers |= {"mode": "L" if is_gray else "RGB", "channels": image_format.channels}
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

"""preprocess.py gives the pixels of `read_image` for all kinds of files.

`tests/engine/train/data/sources/test_resize.py` compares all ways to crop and resize.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.image import read_image
from engine.train.inference.preprocess_script import load_function, preprocess_script
from support.models.sample_images import write_sample_images


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(write_sample_images(tmp_path_factory.mktemp("samples")))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_resize": 40, "interpolation": "bicubic"},
        {"val_resize": 27, "val_size": 24},
        {"fit": "squash", "val_resize": 25, "interpolation": "bicubic"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_script_gives_pixels_of_read_image(options: dict[str, Any], channels: int, samples: list[Path]) -> None:
    image_format = ImageFormat(20, channels, (0.0,) * channels, (1.0,) * channels, **options)
    load = load_function(preprocess_script(image_format))
    for path in samples:
        expected, found = read_image(path, image_format).astype(np.int16), load(path)
        assert (found.shape, found.dtype) == (expected.shape, np.uint8)
        # At full size, JPEG images are resized by torch, which rounds differently; of long images only the center is.
        tolerance = 1 if path.suffix == ".jpg" or path.name == "wide.png" else 0
        assert np.abs(found - expected).max() <= tolerance, path.name


def test_script_has_about_thirty_lines_and_runs_alone(samples: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    script = preprocess_script(ImageFormat(20, 3, (0.0,) * 3, (1.0,) * 3, val_resize=24))
    assert script.count("\n") <= 40
    assert "gputrain" not in script.partition("import sys")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["preprocess.py", str(samples[0])])
        exec(compile(script, "preprocess.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own text
    assert capsys.readouterr().out == f"{samples[0]} (3, 20, 20)\n"

"""Exports are used without gputrain: the code of the model card, in an environment without it, agrees with predict."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.gputrain_command import GPUTRAIN, FinishedRun, SharedGputrain, clean_environment
from support.models.sample_images import write_sample_images

CLASS_COLORS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40), "white": (235, 235, 235)}
RUNTIME_PACKAGES = {
    *("onnxruntime", "flatbuffers", "google", "packaging", "sympy", "mpmath"),
    *("numpy", "numpy.libs", "PIL", "pillow.libs"),
}
OWN_PACKAGES = ("engine", "tui", "gputrain", "_gputrain", "__editable__")
# Runs the code of the model card for each image, and prints what it prints.
RUN_CARD = """
import contextlib, importlib.util, io, json, sys
for name in ("engine", "tui", "gputrain", *sys.argv[1].split(",")):
    assert not name or importlib.util.find_spec(name) is None, name
sys.path.insert(0, ".")
code, results = sys.stdin.read(), {}
for path in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("photo.jpg", path), {"__name__": "card"})
    results[path] = [line.split("  ", 1) for line in printed.getvalue().splitlines()]
print(json.dumps(results))
"""


def write_transparent_photos(root: Path) -> None:
    """Write RGBA images with an object of the color of the class, and another color below the transparent pixels."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("val", 10)):
        for name, color in CLASS_COLORS.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                height, width = rng.integers(40, 90, 2)
                pixels = np.full((height, width, 4), (*list(CLASS_COLORS.values())[rng.integers(4)], 0), np.uint8)
                top, left = rng.integers(0, height // 2), rng.integers(0, width // 2)
                noise = rng.normal(0, 60, (height // 2, width // 2, 3))
                solid = pixels[top : top + height // 2, left : left + width // 2]
                solid[..., :3] = (np.array(color) * 0.5 + 64 + noise).clip(0, 255)
                solid[..., 3] = 255
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")


@pytest.fixture(scope="session")
def transparent_run(shared_gputrain: SharedGputrain) -> FinishedRun:
    """A run of a torchvision model on RGBA photos."""
    write_transparent_photos(shared_gputrain.folder / "rgba")
    options = ["--model", "resnet18", "--epochs", "3", "--batch-size", "16", "--lr", "0.01", "--name", "rgba"]
    data = ["--dataset", "folder", "--data-path", "rgba", "data.image_size=64", "data.workers=0"]
    run = shared_gputrain.train_once("rgba", GPUTRAIN, "run", "--headless", *options, *data)
    assert run.process.returncode == 0, run.process.stderr
    return run


def environment_without_gputrain(folder: Path, *, with_torch: bool) -> Path:
    """Create a virtual environment that sees installed libraries, but not gputrain; return its Python."""
    venv.create(folder)
    packages, site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)})), installed_packages()
    for path in site.iterdir():
        is_own = path.name.startswith(OWN_PACKAGES) or path.suffix == ".pth"
        if not is_own and (with_torch or path.name in RUNTIME_PACKAGES) and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def installed_packages() -> Path:
    return Path(np.__file__).parent.parent


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file_format", ["onnx", "torch-export", "safetensors"])
def test_export_agrees_with_predict_without_gputrain(
    file_format: str, transparent_run: FinishedRun, shared_gputrain: SharedGputrain, tmp_path: Path
) -> None:
    done = shared_gputrain("export", "rgba", "--format", file_format, "--output", str(tmp_path / "export"), "--json")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)["proof"]
    (tmp_path / "kinds").mkdir()
    photos = sorted((shared_gputrain.folder / "rgba" / "val").rglob("*.png"))[:30]
    files = [str(file) for file in (*photos, *write_sample_images(tmp_path / "kinds"))]
    predicted = shared_gputrain("predict", "rgba", *files, "--json", "--gpus", "cpu")
    assert predicted.returncode == 0, predicted.stderr
    python = environment_without_gputrain(tmp_path / "alone", with_torch=file_format != "onnx")
    [code] = re.findall(r"```python\n(.*?)```", (tmp_path / "export" / "README.md").read_text(), re.DOTALL)
    absent = "torch,safetensors" if file_format == "onnx" else ""
    environment = {key: value for key, value in clean_environment(tmp_path).items() if key != "PYTHONPATH"}
    alone = subprocess.run(
        [python, "-c", RUN_CARD, absent, *files],
        cwd=tmp_path / "export",
        env=environment,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    found, worst = json.loads(alone.stdout), 0.0
    for image in json.loads(predicted.stdout)["images"]:
        shown = {name: float(probability) for probability, name in found[image["path"]]}
        assert next(iter(shown)) == image["classes"][0]["name"], image["path"]
        worst = max(worst, *(abs(shown[entry["name"]] - entry["probability"]) for entry in image["classes"]))
    sys.stderr.write(f"{file_format}: {len(files)} images, greatest difference {worst:.1e}; proof {proof}\n")
    # The card prints four digits.
    assert worst < 1e-3

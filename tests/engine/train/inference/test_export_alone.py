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

from support.gputrain_command import clean_environment
from support.models.sample_images import write_sample_images
from support.runs.trained_run import call, saved_run

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
def test_export_agrees_with_predict_without_gputrain(file_format: str, tmp_path: Path) -> None:
    data = {"dataset": "fake", "num_classes": 5, "image_size": 64}
    run = saved_run(tmp_path / "run", data=data, model={"name": "resnet18"})
    done = call("export", run.path, "--format", file_format, "--output", tmp_path / "export", "--json")
    assert done.exit_code == 0, done.stderr
    proof = json.loads(done.stdout)["proof"]
    (tmp_path / "kinds").mkdir()
    files = [str(file) for file in write_sample_images(tmp_path / "kinds")]
    predicted = call("predict", run.path, *files, "--json", "--gpus", "cpu")
    assert predicted.exit_code == 0, predicted.stderr
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

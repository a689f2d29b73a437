"""Formats of an export: missing libraries, models that cannot be traced, test-time augmentation, kept files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from engine.base.codec import read_record
from engine.train.inference.export_program import ExportedNetwork
from engine.train.inference.model_json import ModelDescription
from engine.train.inference.trained_model import load_trained_model
from support.messages import says
from support.runs.trained_run import call, saved_run

DATA_DEPENDENT = """
import torch

class Branching(torch.nn.Module):
    def __init__(self, channels, classes, size):
        super().__init__()
        self.linear = torch.nn.Linear(channels * size * size, classes)

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        if logits.sum() > 0:
            return logits
        return -logits
"""


def test_export_names_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.base.libraries.find_spec", lambda name: None if "onnx" in name else name)
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    done = call("export", saved_run(tmp_path / "run").path, "--format", "onnx")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --format: onnx ")
    assert done.stderr.endswith(": pip install '.[onnx]'\n")


def test_export_of_data_dependent_model_fails_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "branching.py").write_text(DATA_DEPENDENT)
    config = {"model": {"name": "branching:Branching"}, "run": {"code": str(tmp_path)}}
    run = saved_run(tmp_path / "run", **config)
    run.config.write_text(json.dumps(config))
    done = call("export", run.path, "--format", "torch-export", "--output", tmp_path / "out")
    assert done.exit_code == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: --format: ")
    assert says(line, "not-supported", "branching:Branching", f"{tmp_path}/branching.py, line 11")
    assert line.endswith("--format safetensors")
    assert not list((tmp_path / "out").iterdir())
    assert call("export", run.path, "--output", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_program_applies_tta_and_activation_of_the_run(loss: str, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", eval={"tta": "flip"}, loss={"name": loss})
    done = call("export", run.path, "--check-images", "4")
    assert done.exit_code == 0, done.stderr
    description = read_record(run.export / "model.json", ModelDescription)
    assert (description.tta, description.output) == ("flip", "sigmoid" if loss == "bce" else "softmax")
    trained = load_trained_model(run, device="cpu")
    images = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    program = ExportedNetwork(trained.model, description)
    assert torch.equal(program(images), trained.probabilities(images))


def test_export_keeps_files_of_same_weights_and_replaces_those_of_others(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run")
    later = saved_run(tmp_path / "other" / "run", seed=1)
    options = ("--output", tmp_path / "out", "--check-images", "0")
    done = call("export", run.path, *options)
    assert done.exit_code == 0
    assert says(done.stderr, "not-proved", "`gputrain export run --check-images N data.path=PATH`")
    assert call("export", run.path, *options, "--format", "torch-export").exit_code == 0
    assert len(json.loads((tmp_path / "out" / "model.json").read_text())["files"]) == 2
    assert call("export", later.path, *options).exit_code == 0
    assert not (tmp_path / "out" / "model.pt2").exists()

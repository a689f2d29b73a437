"""Export of a trained run as weights and a JSON description for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.config.loader import validate_config
from engine.runs.folder import RunFolder
from engine.train.data.augment.batch_ops import normalize
from engine.train.inference.export import export_model
from engine.train.inference.export_program import standalone_state_dict
from engine.train.inference.trained_model import load_trained_model, read_trained_checkpoint
from engine.train.models.factory import build_model
from engine.train.models.precision import resolve_memory_format
from engine.train.models.transfer import load_weights
from support.gputrain_command import FinishedRun, read_events
from support.messages import says
from support.runs.trained_run import call


def test_export_reproduces_logits_bit_for_bit(short_run: FinishedRun, tmp_path: Path) -> None:
    done = call("export", short_run.path, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(tmp_path / "out" / name) for name in ("model.safetensors", "preprocess.py", "model.json", "README.md")
    ]
    description = json.loads((tmp_path / "out" / "model.json").read_text())
    config, image = validate_config({"model": description["model"]}), description["image"]
    model = build_model(config, image["channels"], len(description["classes"]), image["size"]).eval()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    trained = load_trained_model(RunFolder(short_run.path), device="cpu")
    images = torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8)
    images = images.to(memory_format=resolve_memory_format(trained.checkpoint.config, model, trained.device))
    mean, std = (torch.tensor(image[name]).view(1, 1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        assert torch.equal(model(normalize(images, mean, std)), trained.logits(images))
    best = max(
        (event for event in read_events(short_run.path) if event["type"] == "epoch"),
        key=lambda event: event["val_accuracy"],
    )
    assert (description["epoch"], description["val_accuracy"]) == (best["epoch"], best["val_accuracy"])
    assert description["classes"] == list("0123456789")


def test_export_can_initialize_another_run(run: RunFolder, tmp_path: Path) -> None:
    file = export_model(read_trained_checkpoint(run), run, tmp_path / "out")[0][0]
    config = validate_config({"model": {"weights": str(file)}})
    fresh = build_model(config, 1, 10, 8)
    load_weights(fresh, config, 8, read_trained_checkpoint(run).classes)
    trained = load_trained_model(run, device="cpu").model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in fresh.state_dict().items())
    loaded = load_weights(build_model(config, 1, 10, 8), config, 8, [f"other-{number}" for number in range(10)])
    assert loaded is not None
    assert set(loaded.skipped) == {"9.weight (of other classes)", "9.bias (of other classes)"}


def test_export_command_overwrites_foreign_files_only_with_force(run: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.json").write_text('{"of": "another"}')
    done = call("export", run.path, "--output", output)
    assert done.exit_code == 2
    assert says(done.stderr, "name-in-use", output / "model.json", "short", "--output", "--force")
    assert [path.name for path in output.iterdir()] == ["model.json"]
    assert call("export", run.path, "--output", output, "--force").exit_code == 0
    assert json.loads((output / "model.json").read_text())["run"] == "short"


def test_export_writes_shared_and_half_tensors_as_separate_float32(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    state = standalone_state_dict({"a": shared, "b": shared.t(), "half": shared.half(), "count": torch.tensor(3)})
    assert len({value.data_ptr() for value in state.values()}) == 4
    assert all(value.is_contiguous() for value in state.values())
    assert torch.equal(state["b"], shared.t())
    assert (state["half"].dtype, state["count"].dtype) == (torch.float32, torch.int64)

"""Proof of an export: a broken file, description or script is found, a good one agrees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.base.codec import decode, encode
from engine.runs.folder import RunFolder
from engine.train.inference import export_proof
from engine.train.inference.export import export_model
from engine.train.inference.export_proof import prove_export
from engine.train.inference.model_json import StoredProof
from engine.train.inference.trained_model import (
    TrainedModel,
    build_trained_model,
    load_trained_model,
    read_trained_checkpoint,
)
from support.gputrain_command import FinishedRun
from support.messages import says
from support.runs.trained_run import call, saved_run


@pytest.fixture(scope="module")
def trained(short_run: FinishedRun) -> TrainedModel:
    return load_trained_model(RunFolder(short_run.path), device="cpu")


@pytest.fixture(scope="module")
def exports(short_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all three formats, each of which agreed when it was written."""
    folder = tmp_path_factory.mktemp("exports")
    run = RunFolder(short_run.path)
    for file_format in ("safetensors", "torch-export", "onnx"):
        _, proof = export_model(read_trained_checkpoint(run), run, folder, file_format, max_images=64)
        assert (proof.passed, proof.images, proof.same_class) == (True, 64, 64)
        assert proof.max_difference < 1e-5
    return folder


@pytest.fixture
def folder(exports: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports, tmp_path / "export"))


def test_export_programs_take_any_batch_and_contain_class_names(exports: Path, trained: TrainedModel) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exports / "model.onnx"))
    files = {"classes.json": ""}
    program: Any = torch.export.load(str(exports / "model.pt2"), extra_files=files).module()
    names = session.get_modelmeta().custom_metadata_map["classes"]
    assert json.loads(names) == json.loads(files["classes.json"]) == list(trained.checkpoint.classes)
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    for count in (1, 5):
        images = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8)
        expected = trained.probabilities(images)
        assert torch.allclose(program(images), expected, atol=1e-6)
        [found] = session.run(None, {"images": images.numpy()})
        assert np.allclose(found, expected.numpy(), atol=1e-6)


def test_export_programs_contain_no_paths_of_this_machine(exports: Path) -> None:
    shutil.unpack_archive(exports / "model.pt2", exports / "unpacked", "zip")
    for file in (exports / "model.onnx", *filter(Path.is_file, (exports / "unpacked").rglob("*"))):
        assert str(Path(torch.__file__).parent).encode() not in file.read_bytes(), file
        assert b"engine/train/inference" not in file.read_bytes(), file


def change_safetensors(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    weights = load_file(folder / "model.safetensors")
    name = next(name for name, value in weights.items() if value.ndim > 1)
    save_file(weights | {name: weights[name].flip(0).contiguous()}, folder / "model.safetensors", metadata)


def rename_onnx_input(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.graph.input[0].name = "pixels"
    for node in model.graph.node:
        node.input[:] = ["pixels" if name == "images" else name for name in node.input]
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    ("file_name", "damage"),
    [
        ("model.safetensors", change_safetensors),
        ("model.onnx", rename_onnx_input),
    ],
)
def test_proof_finds_broken_export(
    file_name: str, damage: Callable[[Path], None], folder: Path, trained: TrainedModel
) -> None:
    damage(folder)
    proof = prove_export(trained, folder, file_name, max_images=64)
    assert not proof.passed and file_name in proof.describe(file_name)
    assert decode(encode(proof.to_record()), StoredProof) == proof.to_record()


def test_export_command_exits_with_1_if_an_image_gets_another_class(
    short_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_export = export_proof.load_export

    def load_damaged(path: Path, *arguments: Any) -> Any:
        change_safetensors(path.parent)
        return load_export(path, *arguments)

    monkeypatch.setattr(export_proof, "load_export", load_damaged)
    done = call("export", short_run.path, "--output", tmp_path / "out", "--check-images", "100", "--json")
    assert done.exit_code == 1
    assert "of 100 get the same class" in done.stderr and " instead of " in done.stderr
    proof = json.loads(done.stdout)["proof"]
    assert json.loads((tmp_path / "out" / "model.json").read_text())["files"]["model.safetensors"]["proof"] == proof
    assert proof["same_class"] < 100 and not proof["passed"]
    assert "of 100 get the same class" in (tmp_path / "out" / "README.md").read_text()


def test_proof_ignores_a_change_between_classes_that_are_almost_equally_likely(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "tie")
    checkpoint = read_trained_checkpoint(run)
    weights = {name: torch.zeros_like(value) for name, value in checkpoint.weights.items()}
    trained = build_trained_model(type(checkpoint)(**vars(checkpoint) | {"weights": weights}), "cpu")
    export_model(trained.checkpoint, run, tmp_path / "out", max_images=8)
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    stored[next(name for name in stored if name.endswith("bias"))][3] = 1e-5
    save_file(stored, file, {"classes": json.dumps(checkpoint.classes)})
    proof = prove_export(trained, tmp_path / "out", file.name, max_images=8)
    assert (proof.passed, proof.same_class) == (True, 8)


def test_export_of_deleted_data_says_that_it_was_not_proved(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((9, 9, 4), (number * 40, 90, 50, 20 + 200 * (name == "cat")), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    data = {"dataset": "folder", "path": str(tmp_path / "photos"), "image_size": 8}
    run = saved_run(tmp_path / "gone", data=data)
    shutil.move(tmp_path / "photos", tmp_path / "moved")
    done = call("export", run.path)
    assert done.exit_code == 0
    assert "model.safetensors" in done.stderr and "`gputrain predict`: data.path: " in done.stderr
    assert "`gputrain export gone --check-images N data.path=PATH`" in done.stderr
    assert json.loads((run.export / "model.json").read_text())["files"]["model.safetensors"]["proof"]["images"] == 0
    done = call("export", run.path, f"data.path={tmp_path / 'moved'}")
    assert done.exit_code == 0
    assert "2 validation images: 2 of 2 " in done.stderr


def test_export_refuses_override_of_another_section_before_it_writes(short_run: FinishedRun, tmp_path: Path) -> None:
    done = call("export", short_run.path, "eval.tta=flip", "--output", tmp_path / "out")
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.startswith("error: eval.tta: ") and says(done.stderr, "fixed-value")

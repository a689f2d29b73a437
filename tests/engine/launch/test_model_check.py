"""The model check of the form and of `gputrain doctor`: it builds a model without opening the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from engine.config.loader import resolve_config
from engine.config.schema import as_dict
from engine.launch import preflight_process
from engine.launch.model_check import torch_gpu_problems
from engine.launch.preflight_process import ModelCheck, ModelRequest
from engine.utils.codec import Record, decode, encode
from engine.utils.helper_process import ParentPipe, ask_helper
from support.data.photo_folder import write_photo_folder
from support.messages import has_problem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which the cache would also be."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


class RecordingPipe:
    """The child's side of a pipe with one request."""

    def __init__(self, request: ModelRequest) -> None:
        self._request, self.answer = request, b""

    def requests(self, kind: type[object]) -> Iterator[object]:
        yield decode(encode(self._request), kind)

    def send(self, answer: Record) -> None:
        self.answer = encode(answer)


def model_request(base: str | None, *overrides: str) -> ModelRequest:
    config = as_dict(resolve_config(base, list(overrides)).config)
    return ModelRequest(config=config, on_gpu=False, runs_dir="runs")


def check_model(base: str | None, *overrides: str) -> ModelCheck:
    """Return the answer that the helper process would give."""
    parent, threads = RecordingPipe(model_request(base, *overrides)), torch.get_num_threads()
    try:
        preflight_process.main(cast(ParentPipe, parent))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
    return decode(parent.answer, ModelCheck)


@pytest.mark.parametrize("preset", ["mnist", pytest.param("cifar10", marks=pytest.mark.nightly)])
def test_model_check_downloads_and_writes_nothing(preset: str, folder: Path) -> None:
    answer = ask_helper("engine.launch.preflight_process", ModelCheck, model_request(preset))
    assert answer.problems == [] and (answer.weight_bytes or 0) > 0
    assert list(folder.rglob("*")) == []


def test_model_check_uses_image_format_and_classes_of_dataset(folder: Path) -> None:
    [problem] = check_model("mnist", "model.name=alexnet").problems
    assert has_problem([problem], "not-supported", "model.name", "alexnet ", " 1x28x28 ")
    linear = ["model.name=linear", "data.num_classes=null"]
    decay = ["optim.weight_decay=0.1", "optim.weight_decay_groups={bias: 0}"]
    biggest = check_model("mnist", *linear, *decay, "data.dataset=cifar100")
    assert biggest.weight_bytes == 4 * 100 * (3 * 32 * 32 + 1)
    assert biggest.weight_decay == ((0.1, 1), (0.0, 1))


def test_model_check_opens_no_image_of_folder(folder: Path, tmp_path: Path) -> None:
    photos = write_photo_folder(tmp_path / "photos")
    for image in photos.rglob("*.png"):
        image.write_bytes(b"")
    data = ["data.dataset=folder", f"data.path={photos}", "data.image_size=16", "loss.class_weights=balanced"]
    assert check_model(None, *data, "model.name=linear").weight_bytes == 4 * 2 * (3 * 16 * 16 + 1)
    assert list(folder.rglob("*")) == []


def test_model_check_does_not_run_code_of_user_dataset(folder: Path) -> None:
    assert "opening mine:build" in check_model(None, "data.dataset=mine:build").error


def test_torch_gpu_problems_report_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    [problem] = torch_gpu_problems()
    assert has_problem([problem], "not-supported", "device.gpus", torch.__version__, "--gpus cpu")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Found no NVIDIA driver on your system", "not-supported"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu-in-use"),
    ],
)
def test_torch_gpu_problems_report_why_cuda_does_not_start(
    message: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", fail)
    [problem] = torch_gpu_problems()
    assert has_problem([problem], code, "device.gpus", message)

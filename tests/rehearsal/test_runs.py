"""Runs on GPUs: their input pipelines and their journals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from support.gpu.fake_cuda import Rehearsal, losses_of, run_started
from support.gpu.fake_gpu_host import UNKNOWN_PID, gpu_line
from support.gputrain_command import read_events

DIGITS = ("digits", "--epochs", "1", "--gpus", "free:2")


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "options",
    [
        ["data.pipeline=stream"],
        # Only the validation images keep the strides of the expansion.
        ["data.pipeline=stream", "augment.policy=randaugment"],
    ],
    ids=["stream", "randaugment"],
)
def test_gray_images_expand_to_three_channels(rehearsal: Rehearsal, options: list[str]) -> None:
    run = rehearsal.run("gray", *DIGITS, "data.channels=3", *options)
    assert read_events(run)[-1]["state"] == "finished"


@pytest.mark.rehearsal
def test_photos_that_threads_load_train_as_on_cpu(rehearsal: Rehearsal) -> None:
    for number in range(48):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        path = rehearsal.folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    options = [
        "--dataset",
        "folder",
        "--data-path",
        "photos",
        "--model",
        "linear",
        "--batch-size",
        "4",
        "--epochs",
        "2",
    ]
    options += ["data.image_size=16", "augment.resized_crop=true", "augment.flip=true", "run.log_every=1"]
    runs = [
        rehearsal.run(name, *options, "--workers", "2", *devices)
        for name, devices in {"gpu": ("--gpus", "free:2"), "cpu": ("--gpus", "cpu", "--ranks", "2")}.items()
    ]
    assert run_started(runs[0])["worker_type"] == "threads"
    assert losses_of(runs[0]) == pytest.approx(losses_of(runs[1]), rel=1e-5)


@pytest.mark.rehearsal
def test_journal_begins_with_run_started(rehearsal: Rehearsal) -> None:
    run = rehearsal.run("watched", *DIGITS)
    assert [event["type"] for event in read_events(run)[:2]] == ["run_started", "gpus"]
    assert rehearsal("resume", "watched", "--headless", "run.epochs=2").returncode == 0
    types = [event["type"] for event in read_events(run)]
    resumed = types.index("run_resumed")
    assert types[resumed - 1 : resumed + 2] == ["run_finished", "run_resumed", "gpus"]


@pytest.mark.rehearsal
def test_checkpoint_of_gpu_loads_without_gpu(rehearsal: Rehearsal) -> None:
    options = ("--gpus", "free:1", "--optimizer", "adamw", "model.ema=0.9", "precision.amp=fp16")
    run = rehearsal.run("gpu", "digits", "--epochs", "1", *options)
    assert not torch.cuda.is_available()
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert {tensor.device.type for name in ("model", "ema") for tensor in state[name].values()} == {"cpu"}
    assert state["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"
    assert rehearsal("resume", "gpu", "--headless", "run.epochs=2", "device.gpus=cpu").returncode == 0


@pytest.mark.rehearsal
def test_single_rank_creates_no_nccl_communicator(rehearsal: Rehearsal) -> None:
    run = rehearsal.run("single", "digits", "--epochs", "1", "--gpus", "free:1", "run.log_every=1")
    assert run_started(run)["backend"] == "gloo"
    lines = [line for lines in rehearsal.cuda_log().values() for line in lines]
    assert any(line.startswith("context") for line in lines)
    assert not any("nccl" in line for line in lines)


@pytest.mark.rehearsal
def test_evaluate_runs_on_free_gpu(rehearsal: Rehearsal) -> None:
    rehearsal.run("cpu", "digits", "--epochs", "1", "--gpus", "cpu")
    rehearsal.host.set_scene([gpu_line(0), gpu_line(1), f"process 0 {UNKNOWN_PID} 4096 compute"])
    results = [json.loads(rehearsal("evaluate", "cpu", "--json", "--gpus", name).stdout) for name in ("auto", "cpu")]
    assert results[0]["top1"] == results[1]["top1"] > 0.5
    contexts = [line for lines in rehearsal.cuda_log().values() for line in lines if line.startswith("context")]
    assert len(contexts) == 1

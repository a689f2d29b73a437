"""Results of training: equal to a single process with the global batch, and each validation image counts once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config.loader import resolve_config
from engine.data.augment.batch_ops import normalize
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.distributed.failures import NonFiniteLossError
from engine.models.factory import build_model
from engine.runs.events import Event, StepEvent
from engine.training.train import run_training
from support.gputrain_command import Gputrain, SharedGputrain, read_events
from support.messages import raises_problem, says
from support.runs.in_process import single_rank_trainer

SMALL = ["run", "--headless", "--model", "linear", "--lr", "0.01", "run.log_every=1"]


def losses_of(run: Path) -> list[float]:
    return [loss for event in read_events(run) if event["type"] == "step" for loss in event["losses"]]


def train(gputrain: Gputrain, name: str, *arguments: str) -> Path:
    done = gputrain(*SMALL, "--name", name, *arguments)
    assert done.returncode == 0, done.stderr
    return gputrain.runs / name


# A prime number of validation images, and a last training batch of 5 images.
PRIME = ["data.dataset=fake", "data.fake_val=101", "data.fake_train=101", "data.drop_last=false", "data.image_size=8"]
# Differs if an image is missing, counted twice or out of order.
ORDER_METRIC = """
def order(probabilities, labels):
    place = labels.new_ones(len(labels)).cumsum(0).double()
    return {"labels": (place * labels).sum(), "outputs": (place * probabilities[:, 3].double()).sum()}
"""


@pytest.fixture(scope="session")
def prime_size_run(shared_gputrain: SharedGputrain) -> Path:
    """The same training on 3 ranks, with a metric of the user's own."""
    (shared_gputrain.folder / "prime_metrics.py").write_text(ORDER_METRIC)
    options = ("eval.metrics=prime_metrics:order", "--epochs", "2", "--ranks", "3", "--batch-size", "16")
    return shared_gputrain.once("prime", lambda gputrain: train(gputrain, "prime", *PRIME, *options))


@pytest.fixture(scope="session")
def single_rank_losses() -> list[float]:
    """Losses of the same training on one rank."""
    events: list[Event] = []
    alone = ["data.batch_size=48", "run.epochs=2", "model.name=linear", "optim.lr=0.01", "run.log_every=1"]
    with single_rank_trainer(*PRIME, *alone, base=None, events=events) as fit:
        run_training(fit, [])
    return [loss for event in events if isinstance(event, StepEvent) for loss in event.losses]


def test_validation_counts_each_image_once_on_any_number_of_ranks(prime_size_run: Path) -> None:
    run = prime_size_run
    summary = json.loads((run / "summary.json").read_text())
    config = resolve_config(str(run / "config.yaml")).config
    source = open_source(config)
    model = build_model(config, 3, 10, 8)
    model.load_state_dict(torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"])
    input_format = model_input_format(config, source)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (input_format.mean, input_format.std))
    images, labels = (torch.from_numpy(part) for part in source.load("val", torch.arange(101).numpy()))
    with torch.no_grad():
        logits = model(normalize(images, mean, std))
    assert summary["val_accuracy"] == (logits.argmax(1) == labels).sum().item() / 101
    assert summary["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    place = torch.arange(1, 102).double()
    assert summary["metrics"]["labels"] == (place * labels).sum().item()
    outputs = (place * logits.softmax(1)[:, 3].double()).sum().item()
    assert summary["metrics"]["outputs"] == pytest.approx(outputs, rel=1e-5)


def test_runs_filters_by_metric_of_the_user(shared_gputrain: SharedGputrain, prime_size_run: Path) -> None:
    assert f'"{prime_size_run.name}"' in shared_gputrain("runs", "--json", "metrics.labels>1").stdout
    assert prime_size_run.name not in shared_gputrain("runs", "metrics.labels<1").stdout


def test_uneven_last_batch_weighs_each_image_equally(prime_size_run: Path, single_rank_losses: list[float]) -> None:
    assert len(single_rank_losses) == 2 * 3
    assert losses_of(prime_size_run) == pytest.approx(single_rank_losses, rel=1e-4)


def test_nonfinite_validation_loss_fails_run(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import torch\n\ndef loss(logits, labels):\n    value = torch.nn.functional.cross_entropy(logits, labels)\n"
        "    return value if torch.is_grad_enabled() else value + float('inf')\n"
    )
    user_code = ("loss.name=endless:loss", f"run.code={tmp_path}", "model.name=linear")
    with (
        raises_problem("non-finite", None, " 1 ", "inf", kind=NonFiniteLossError),
        single_rank_trainer(*user_code) as fit,
    ):
        run_training(fit, [])


@pytest.mark.nightly
def test_resume_accepts_fewer_ranks_and_changed_settings(gputrain: Gputrain) -> None:
    train(gputrain, "fewer", "--ranks", "2", "--epochs", "1", "--batch-size", "16", "optim.lr_scaling=linear")
    resumed = gputrain("resume", "fewer", "run.epochs=2", "device.ranks=1", "optim.momentum=0.5")
    assert resumed.returncode == 0, resumed.stderr
    assert says(resumed.stderr, "resume-differs", "2 ranks", "32", "1 and 16")
    epochs = [event for event in read_events(gputrain.runs / "fewer") if event["type"] == "epoch"]
    assert [(epoch["epoch"], epoch["lr"]) for epoch in epochs] == [(1, 0.02), (2, 0.01)]
    resumed_config = resolve_config(str(gputrain.runs / "fewer" / "config.yaml")).config
    assert (resumed_config.run.epochs, resumed_config.device.ranks, resumed_config.optim.momentum) == (2, 1, 0.5)
    state = torch.load(gputrain.runs / "fewer" / "checkpoints" / "last.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_dry_run_prints_plan_and_leaves_no_folder(gputrain: Gputrain) -> None:
    unused = ("schedule.power=2", "device.empty_cache=true", "run.requeue=true", "--name", "a")
    done = gputrain("run", "--headless", "digits", "--dry-run", "--ranks", "1", *unused)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if says(line, "no-effect")]
    assert [line.split()[1] for line in warnings] == [
        "schedule.power=2.0",
        "device.empty_cache=true",
        "run.requeue=true",
    ]
    assert "schedule.name=cosine" in warnings[0] and "polynomial" in warnings[0]
    rows = {line[:18].strip(): line[18:].strip() for line in done.stdout.splitlines()}
    assert rows["ranks"] == "1"
    assert rows["devices"] == "cpu"
    assert rows["global batch size"] == "32"
    assert rows["steps per epoch"] == "44"
    assert rows["parameters"] == "21,578"
    assert not gputrain.runs.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("amp", ["off", "fp16", "bf16"])
def test_run_trains_on_free_gpu(gputrain: Gputrain, amp: str) -> None:
    del gputrain.environment["CUDA_VISIBLE_DEVICES"]
    done = gputrain("run", "--headless", "digits", "--gpus", "free:1", "--name", "gpu", "--amp", amp)
    assert done.returncode == 0, done.stderr
    started = read_events(gputrain.runs / "gpu")[0]
    assert started["backend"] == "gloo"
    assert started["devices"][0].startswith("GPU-")
    assert started["ranks"][0]["device"] == started["devices"][0]
    assert json.loads((gputrain.runs / "gpu" / "summary.json").read_text())["val_accuracy"] > 0.97


def test_run_trains_on_image_folder_and_writes_class_indices(gputrain: Gputrain) -> None:
    from PIL import Image

    for label, color in (("cat", 240), ("dog", 20)):
        for number in range(12):
            path = gputrain.folder / "animals" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (20, 16), color - number).save(path)
    # A file name that is not valid UTF-8 and contains an escape sequence that clears the screen.
    undecodable_name = os.fsencode(gputrain.folder / "animals" / "dog") + b"/\xff\x1b[2J.txt"
    Path(os.fsdecode(undecodable_name)).write_text("no picture")
    folder = ["--dataset", "folder", "--data-path", "animals", "data.image_size=16", "--batch-size", "4"]
    done = gputrain("run", "--headless", *folder, "--epochs", "3", "--name", "animals", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "bad-image", "warning: 1 item skipped", "dog/\\udcff\\x1b[2J.txt")
    assert ", memory pipeline (the decoded images take 18 KiB)" in done.stderr
    run = gputrain.runs / "animals"
    assert json.loads((run / "class_indices.json").read_text()) == {"0": "cat", "1": "dog"}
    assert json.loads((run / "summary.json").read_text())["val_accuracy"] == 1.0

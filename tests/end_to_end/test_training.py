"""Results of training: equal to a single process with the global batch, and each validation image counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config.loader import resolve_config
from engine.runs.events import Event, StepEvent
from engine.train.data.augment.batch_ops import normalize
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.loop.train import run_training
from engine.train.models.factory import build_model
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

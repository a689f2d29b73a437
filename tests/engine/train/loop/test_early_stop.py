"""Training with `run.early_stop` ends early, and is otherwise that of a run without it."""

from __future__ import annotations

from pathlib import Path

from engine.runs.events import EpochEvent
from support.runs.in_process import train_in_process

RUN = ("model.name=linear", "run.epochs=6", "checkpoint.keep=6")
# No accuracy gains more than 1, so the first epoch is the last gain.
EARLY = (*RUN, "run.early_stop=2", "run.early_stop_min_delta=1")


def results(epochs: list[EpochEvent]) -> list[tuple[float, ...]]:
    return [(epoch.epoch, epoch.train_loss, epoch.val_loss, epoch.val_accuracy, epoch.lr) for epoch in epochs]


def test_early_stop_ends_training_without_changing_it_and_survives_resume(tmp_path: Path) -> None:
    plain = train_in_process(tmp_path / "plain", *RUN)
    early = train_in_process(tmp_path / "early", *EARLY)
    assert results(early) == results(plain)[:3]

    second_epoch = sorted((tmp_path / "early" / "checkpoints").glob("step-*.pt"))[1]
    resumed = train_in_process(tmp_path / "resumed", *EARLY, checkpoint=second_epoch)
    assert results(resumed) == results(plain)[2:3]
    # The crash came between the last checkpoint and the end of the run: nothing is left to train.
    last = tmp_path / "early" / "checkpoints" / "last.pt"
    assert train_in_process(tmp_path / "ended", *EARLY, checkpoint=last) == []
    longer = train_in_process(tmp_path / "longer", *RUN, checkpoint=last)
    assert results(longer) == results(plain)[3:]

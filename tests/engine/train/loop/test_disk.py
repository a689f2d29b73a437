"""Warnings before a run about disk space for its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.loop import disk
from engine.train.loop.disk import disk_warnings
from support.messages import has_problem

PLAIN_SGD = ["optim.name=sgd", "optim.momentum=0"]


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def test_disk_space_check_covers_kept_best_and_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_config, folder = config("checkpoint.keep=3", "run.epochs=10", *PLAIN_SGD), tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(disk, "free_bytes", lambda _: 5 << 20)
    assert not [*disk_warnings(keep_config, folder, 1 << 20)]
    monkeypatch.setattr(disk, "free_bytes", lambda _: (5 << 20) - 1)
    warnings = [*disk_warnings(keep_config, folder, 1 << 20)]
    assert has_problem(warnings, "disk-full", "", f"{tmp_path / 'run'} ", " 5 MiB ", "(5 files of 1 MiB)")
    assert has_problem(warnings, "disk-full", "", "checkpoint.keep", "--runs-dir")


@pytest.mark.parametrize(("keep", "files"), [(3, "3 files of 1 MiB"), (1, "1 file of 1 MiB")])
def test_disk_space_check_counts_existing_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, files: str
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    (tmp_path / "epoch-0001.pt").touch()
    (tmp_path / "best.pt").touch()
    (tmp_path / "last.pt").hardlink_to(tmp_path / "best.pt")
    warnings = [*disk_warnings(config(f"checkpoint.keep={keep}", *PLAIN_SGD), tmp_path, 1 << 20)]
    assert has_problem(warnings, "disk-full", "", f"({files})")


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (PLAIN_SGD, 1),
        (["optim.name=sgd"], 2),
        (["optim.name=adam"], 3),
        (["optim.name=adamw"], 3),
    ],
)
def test_disk_space_check_includes_optimizer_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], copies: int
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    warnings = [*disk_warnings(config(*overrides), tmp_path, 1 << 20)]
    assert has_problem(warnings, "disk-full", "", f" of {copies} MiB)")

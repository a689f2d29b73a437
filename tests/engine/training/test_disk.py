"""Warnings before a run about disk space for its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.training.disk import checkpoint_bytes, disk_shortage, disk_warnings, max_new_checkpoints
from engine.utils.errors import Problem
from support.messages import has_problem


def is_shortage(shortage: Problem | None, code: str, *values: str) -> bool:
    return shortage is not None and has_problem([shortage], code, "", *values)


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def test_disk_space_check_covers_kept_best_and_new_checkpoint(tmp_path: Path) -> None:
    keep_config = config("checkpoint.keep=3", "run.epochs=10")
    assert max_new_checkpoints(keep_config) == 5
    assert disk_shortage(tmp_path, 5 << 20, 1 << 20, max_new_checkpoints(keep_config)) is None
    shortage = disk_shortage(tmp_path, (5 << 20) - 1, 1 << 20, 5)
    assert is_shortage(shortage, "disk-full", f"{tmp_path} ", " 5 MiB ", "(5 files of 1 MiB)")
    [warning] = disk_warnings(keep_config, tmp_path / "runs" / "new" / "checkpoints", 1 << 60)
    assert has_problem([warning], "disk-full", "", "checkpoint.keep", "--runs-dir")


def test_disk_space_check_counts_existing_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "epoch-0001.pt").touch()
    (tmp_path / "best.pt").touch()
    (tmp_path / "last.pt").hardlink_to(tmp_path / "best.pt")
    assert max_new_checkpoints(config("checkpoint.keep=3", "run.epochs=10"), tmp_path) == 3
    assert max_new_checkpoints(config("checkpoint.keep=1", "run.epochs=1"), tmp_path) == 1


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["optim.name=sgd", "optim.momentum=0"], 1),
        (["optim.name=sgd"], 2),
        (["optim.name=adam"], 3),
        (["optim.name=adamw"], 3),
    ],
)
def test_checkpoint_bytes_include_optimizer_state(overrides: list[str], copies: int) -> None:
    assert checkpoint_bytes(1000, config(*overrides).optim) == 1000 * copies

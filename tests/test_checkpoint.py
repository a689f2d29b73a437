"""Checkpoint files: which are kept, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint import keep_checkpoint, load_checkpoint, rng_state, save_checkpoint, set_rng_state
from engine.problems import UsageError

CPU = torch.device("cpu")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_epochs_are_kept_beside_last_and_best(tmp_path: Path) -> None:
    for epoch in (9997, 9998, 9999, 10000, 10001):
        save_checkpoint({"epoch": epoch}, tmp_path)
        keep_checkpoint(tmp_path, epoch, best=epoch == 9998, keep=2)
    assert names(tmp_path) == ["best.pt", "epoch-10000.pt", "epoch-10001.pt", "last.pt"]
    assert load_checkpoint(tmp_path / "best.pt")["epoch"] == 9998
    assert load_checkpoint(tmp_path / "last.pt")["epoch"] == 10001


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint({"epoch": 1}, tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint({"epoch": 2}, tmp_path)
    assert names(tmp_path) == ["last.pt"]
    assert load_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_every_random_number_generator_goes_on_where_it_was() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(1).item()  # noqa: S311

    random.gauss()
    np.random.standard_normal()
    state = rng_state(CPU)
    first = draw()
    assert draw() != first
    set_rng_state(state, CPU)
    assert draw() == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged or no checkpoint"),
        (b"torn" * 100, "is damaged or no checkpoint"),
        (None, "there is no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_checkpoint(tmp_path / "last.pt")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 2}, tmp_path / "last.pt")
    with pytest.raises(UsageError, match="has format 2, and this gputrain reads format 1"):
        load_checkpoint(tmp_path / "last.pt")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save({"format": 1, "code": print}, tmp_path / "last.pt")
    with pytest.raises(UsageError, match="is damaged or no checkpoint"):
        load_checkpoint(tmp_path / "last.pt")

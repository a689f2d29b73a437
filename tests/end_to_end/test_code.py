"""The user code of a training: as it was queued, in its first session and when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gputrain_command import Gputrain
from support.repositories import make_repository, write_files

LOSS = """
import torch.nn.functional as F

print("version 1 of", __file__)

def loss(output, target):
    return F.cross_entropy(output, target)
"""


@pytest.mark.nightly
def test_training_from_a_snapshot_keeps_its_user_code(gputrain: Gputrain, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "work", mine__py=LOSS)
    options = ("--gpus", "cpu", "--ranks", "1", "--headless", "loss.name=mine:loss", f"run.code={root}")
    run = ("run", "digits", "--epochs", "1", *options)
    assert gputrain(*run, "--name", "snap", "--snapshot").returncode == 0
    write_files(root, mine__py=LOSS.replace("version 1", "version 2"))
    assert gputrain("resume", "snap", "run.epochs=2", "--headless").returncode == 0
    log = (gputrain.runs / "snap" / "log.txt").read_text()
    assert f"version 1 of {gputrain.runs}/snap/code/copy/mine.py" in log and "version 2" not in log
    assert str(root) in (gputrain.runs / "snap" / "config.yaml").read_text()

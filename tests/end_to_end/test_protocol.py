"""gputrain evaluates photos of twelve kinds as torchvision does, with all of its commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.gputrain_command import ROOT


@pytest.mark.nightly
def test_evaluation_protocol_matches_torchvision() -> None:
    command = [sys.executable, str(ROOT / "tests" / "compare_protocol.py"), "resnet18", "--photos", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" of 1 |") + done.stdout.count(" of 8 |") == 2 * 11
    assert "refused by torchvision: 1, by gputrain: 1" in done.stdout

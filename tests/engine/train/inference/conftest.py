"""Fixture for the inference tests: a trained run that a test may modify."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.runs.folder import RunFolder
from support.gputrain_command import FinishedRun


@pytest.fixture
def run(short_run: FinishedRun, tmp_path: Path) -> RunFolder:
    """A copy of the trained run, which the test may modify."""
    return RunFolder(Path(shutil.copytree(short_run.path, tmp_path / "runs" / "short")))

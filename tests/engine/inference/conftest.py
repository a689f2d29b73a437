"""A trained run that each test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.runs.folder import RunFolder
from gputrain_command import FinishedRun


@pytest.fixture
def run(short_run: FinishedRun, tmp_path: Path) -> RunFolder:
    """A trained run of the test's own."""
    return RunFolder(Path(shutil.copytree(short_run.path, tmp_path / "runs" / "short")))

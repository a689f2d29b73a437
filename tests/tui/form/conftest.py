"""Fixtures of the form."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def isolated_xdg_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))

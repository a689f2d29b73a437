"""Fixtures of the input pipeline tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.files import cache_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of an empty decoded cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "decoded"

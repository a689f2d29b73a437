"""Fixtures of the screen tests: an isolated working folder, and the runs of the demo in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.screen.demo_app import FROZEN_NOW, demo_runs
from tui.form.checks import FormChecker


@pytest.fixture(autouse=True)
def color_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal with all colors, so that the screens have the default theme, and a clipboard of its own."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    for name in ("NO_COLOR", "TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def fast_preflight(preflight_in_process: None) -> None:
    """The form checks a config without a process, which takes half a second to start."""


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host may have one, and the form a field for it."""
    monkeypatch.setattr("tui.screens.form.found_engines", list)


@pytest.fixture
def isolated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of keys: the values are validated, but not checked against this host."""
    monkeypatch.setattr(FormChecker, "check", lambda *_, **__: None)


@pytest.fixture
def demo_runs_folder(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "runs"
    owners = demo_runs(root)
    yield root
    for owner in owners:
        owner.release()


@pytest.fixture
def live_demo_runs(frozen_environment: None) -> Iterator[Path]:
    """For snapshots: the runs of the demo, at a path that is the same in each test."""
    root = Path("runs")
    [owner] = demo_runs(root)
    yield root
    owner.release()


@pytest.fixture
def frozen_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For snapshots: isolated folders, and a fixed time, time zone and number of CPU cores."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    monkeypatch.delenv("GPUTRAIN_RUNS", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("tui.screens.tables.ranks.time.time", lambda: FROZEN_NOW)
    monkeypatch.setattr("engine.base.host.available_cores", lambda: 16)
    yield
    monkeypatch.undo()
    time.tzset()

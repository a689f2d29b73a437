"""The user's limits: set by the settings file, and what a config may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.files import settings_file
from engine.config.limits import NO_LIMITS, limit_text, over_limit_problems, read_limits, requested_gpus, time_limit
from engine.config.loader import resolve_config
from engine.config.settings import Limits
from support.messages import has_problem, raises_problem


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings_file().parent.mkdir(parents=True)
    return settings_file()


def test_limits_are_those_of_settings(settings: Path) -> None:
    assert read_limits() == NO_LIMITS
    settings.write_text("limits: {gpus: 2, hours: 1.5}\n")
    assert read_limits() == Limits(gpus=2, hours=1.5)
    assert limit_text("gpus", 2) == f"limits.gpus is 2 ({settings})"


@pytest.mark.parametrize("text", ["limits: {gpu: 2}", "limits: {gpus: 0}", "limits: {gpus: x}", "limits: 3"])
def test_settings_refuse_other_limits(settings: Path, text: str) -> None:
    settings.write_text(text)
    with raises_problem("wrong-format", str(settings), "limits: {gpus: N"):
        read_limits()


@pytest.mark.parametrize(
    ("selection", "count"),
    [("cpu", 0), ("auto", 1), ("all", 8), ("free:3", 3), ("0", 1), ("0,2", 2), ("GPU-aa,GPU-bb,GPU-cc", 3)],
)
def test_requested_gpus_counts_what_a_selection_asks_for(selection: str, count: int) -> None:
    assert requested_gpus(selection, visible=8) == count


def test_run_that_asks_for_more_gpus_than_the_limit_is_refused(settings: Path) -> None:
    settings.write_text("limits: {gpus: 2}")
    for selection, is_refused in (("free:2", False), ("auto", False), ("free:3", True), ("0,1,2", True)):
        resolved = resolve_config("digits", [f"device.gpus={selection}"])
        problems = over_limit_problems(read_limits(), resolved.config, resolved.typed)
        assert has_problem(problems, "over-limit", "device.gpus", selection, "2", settings) == is_refused


@pytest.mark.parametrize(
    ("minutes", "is_refused", "in_force"), [(None, False, 120), (0, True, 120), (60, False, 60), (121, True, 120)]
)
def test_hours_are_the_default_and_the_highest_time_limit(
    minutes: int | None, is_refused: bool, in_force: float, settings: Path
) -> None:
    settings.write_text("limits: {hours: 2}")
    resolved = resolve_config("digits", [] if minutes is None else [f"queue.time_limit={minutes}"])
    limits = read_limits()
    problems = over_limit_problems(limits, resolved.config, resolved.typed)
    assert has_problem(problems, "over-limit", "queue.time_limit", "--time-limit 120") == is_refused
    assert time_limit(limits.hours, resolved.config)[0] == in_force

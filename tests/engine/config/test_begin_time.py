"""The time of `queue.begin`: the forms of sbatch, days, and daylight saving time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from engine.config.begin_time import begin_time
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from support.messages import has_problem


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOW = utc("2026-11-28T12:30:00")  # 13:30 in Berlin


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", "2026-11-28T12:30:00"),
        ("now+60", "2026-11-28T12:31:00"),
        ("now+2h", "2026-11-28T14:30:00"),
        ("now + 90 minutes", "2026-11-28T14:00:00"),
        ("now+1week", "2026-12-05T12:30:00"),
        ("22:00", "2026-11-28T21:00:00"),
        ("9:05", "2026-11-29T08:05:00"),
        ("13:30:30", "2026-11-28T12:30:30"),
        ("13:30", "2026-11-29T12:30:00"),
        ("tomorrow", "2026-11-28T23:00:00"),
        ("2026-12-01", "2026-11-30T23:00:00"),
        ("2026-12-01T08:00", "2026-12-01T07:00:00"),
        ("2026-12-01t08:00:30", "2026-12-01T07:00:30"),
        ("2026-12-01T08:00+00:00", "2026-12-01T08:00:00"),
        ("2020-01-01", "2019-12-31T23:00:00"),
    ],
)
def test_begin_time_is_read_as_sbatch_does(text: str, expected: str) -> None:
    assert begin_time(text, NOW) == utc(expected)


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        # Clocks go back by an hour at 03:00 of that night, so a day has 25 hours; 02:30 is the first one.
        ("2026-10-24T20:00:00", "22:00", "2026-10-25T21:00:00"),
        ("2026-10-24T20:00:00", "02:30", "2026-10-25T00:30:00"),
        # Clocks go forward at 02:00, so there is no 02:30.
        ("2026-03-28T21:00:00", "02:30", "2026-03-29T01:30:00"),
        ("2026-03-28T21:00:00", "now+24h", "2026-03-29T21:00:00"),
    ],
)
def test_begin_time_follows_daylight_saving_time(now: str, text: str, expected: str) -> None:
    assert begin_time(text, utc(now)) == utc(expected)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "25:00", "22:60", "now+", "now+2x", "now-2h", "now+99999999w", "2026-13-01", "2099-01-01", "20261201",
     "２２:00", "22:00; rm"],
)  # fmt: skip
def test_other_text_is_no_begin_time(text: str) -> None:
    assert begin_time(text, NOW) is None


def test_begin_time_implies_wait_and_is_not_stored() -> None:
    config = resolve_config("digits", ["queue.begin=now+2h"]).config
    assert config.waits
    assert "begin" not in as_stored(config)["queue"]


def test_begin_time_in_the_past_is_a_warning() -> None:
    resolved = resolve_config("digits", ["queue.begin=2020-01-01T00:00"])
    assert has_problem([part.warning for part in resolved.no_effect], "no-effect", "", "queue.begin=2020-01-01T00:00")
    assert resolve_config("digits", ["queue.begin=now+2h"]).no_effect == ()

"""The time of `queue.begin` as it is typed: the forms of `sbatch --begin` that name a time without doubt.

`queue_section` and `engine.jobs.queue.edit` check it, and `engine.jobs.queue.place` stores the Unix time that it means
when the run is queued.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from datetime import time as clock_time

UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_SHORT_UNITS = {"": "second", "s": "second", "sec": "second", "m": "minute", "min": "minute", "h": "hour", "d": "day"}
BEGIN_FORMS = "now+2h, 22:00, tomorrow or 2026-12-01T08:00 (local)"
NOT_A_BEGIN_TIME = f"must be a time, such as {BEGIN_FORMS}"
MAX_DELAY_SECONDS = 10 * 365 * 86400  # a longer one is a mistake
_FROM_NOW = re.compile(r"now(?:\s*\+\s*(\d{1,9})\s*([a-z]*))?", re.ASCII)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)


def begin_time(text: str, now: float) -> float | None:
    """Parse a begin time. Return Unix seconds, None if it is no time; `now` is the current time in Unix seconds.

    As for sbatch, a time of day without a date is the next one, a date without a time is midnight, a delay without a
    unit is in seconds, and a date in the past is allowed. Times without an offset are local. Of a time that daylight
    saving time repeats, the first is meant; one that it skips is moved by the hour.
    """
    text = text.strip().lower()
    if match := _FROM_NOW.fullmatch(text):
        delay_s = _delay_s(match[1] or "0", match[2] or "")
        return None if delay_s is None else now + delay_s
    local_now = datetime.fromtimestamp(now)
    if text in ("today", "tomorrow"):
        date = local_now.date() + timedelta(days=text == "tomorrow")
        return datetime.combine(date, clock_time(0)).timestamp()
    if _CLOCK.fullmatch(text) and (clock := _parse_clock(text)) is not None:
        today = datetime.combine(local_now.date(), clock).timestamp()
        tomorrow = datetime.combine(local_now.date() + timedelta(days=1), clock).timestamp()
        return today if today > now else tomorrow
    return _parse_date(text, now)


def _delay_s(count: str, unit: str) -> float | None:
    unit = _SHORT_UNITS.get(unit) or unit.removesuffix("s")
    delay_s = int(count) * UNIT_SECONDS.get(unit, MAX_DELAY_SECONDS + 1)
    return delay_s if delay_s <= MAX_DELAY_SECONDS and unit in UNIT_SECONDS else None


def _parse_clock(text: str) -> clock_time | None:
    try:
        return clock_time.fromisoformat(text if text.index(":") == 2 else f"0{text}")
    except ValueError:
        return None


def _parse_date(text: str, now: float) -> float | None:
    if re.match(r"\d{4}-\d{2}-\d{2}", text, re.ASCII) is None:
        return None
    try:
        found = datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return found if 0 <= found <= now + MAX_DELAY_SECONDS else None

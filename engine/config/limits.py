"""The user's limits against accidents: GPUs and runs at once, and hours per run.

`limits:` of the settings file sets them. They are no security boundary: the user can change the file.

`engine.gpus.own_limits` counts what the user's runs hold, `engine.jobs.launch` applies the hours.
"""

from __future__ import annotations

from engine.base.errors import Problem
from engine.base.files import settings_file
from engine.base.units import format_number
from engine.config.schema import Config
from engine.config.settings import Limits, read_settings

NO_LIMITS = Limits()


def limit_text(key: str, value: float) -> str:
    """Return a limit in force, its value and where it is set."""
    return f"limits.{key} is {format_number(value)} ({settings_file()})"


def time_limit(hours: float | None, config: Config) -> tuple[float, str]:
    """Return the time limit of a run in minutes, 0 for none, and what sets it. `hours` is the limit of the settings."""
    limit_min = config.queue.time_limit
    if hours is None or 0 < limit_min <= 60 * hours:
        return limit_min, f"queue.time_limit ({limit_min:g} min)"
    return 60 * hours, f"limits.hours ({hours:g} h)"


def over_limit_problems(limits: Limits, config: Config, typed: frozenset[str]) -> list[Problem]:
    """Return why a run with this config exceeds a limit whatever else runs. `typed` are the keys that were typed."""
    found = []
    wanted, minutes, hours = requested_gpus(config.device.gpus), config.queue.time_limit, limits.hours
    if limits.gpus is not None and wanted > limits.gpus:
        found.append(too_many_gpus(config.device.gpus, wanted, limits.gpus))
    if hours is not None and "queue.time_limit" in typed and not 0 < minutes <= 60 * hours:
        text = f"{minutes:g} min" if minutes else "no time limit"
        reason = f"{text} is not allowed: {limit_text('hours', hours)}"
        found.append(
            Problem("queue.time_limit", reason, f"type --time-limit {60 * hours:g} or less", code="over-limit")
        )
    return found


def too_many_gpus(selection: str, wanted: int, limit: int) -> Problem:
    """Return the problem of a run that asks for more GPUs than its user may use at once."""
    advice = "request fewer, or raise the limit there"
    return Problem(
        "device.gpus", f"{selection} asks for {wanted} GPUs: {limit_text('gpus', limit)}", advice, code="over-limit"
    )


def requested_gpus(selection: str, visible: int = 0) -> int:
    """Return how many GPUs a value of `device.gpus` asks for at least; `all` are the `visible` ones."""
    if selection == "cpu":
        return 0
    if selection in ("auto", "all"):
        return visible if selection == "all" else min(visible, 1)
    count = selection.removeprefix("free:")
    return int(count) if count != selection and count.isdecimal() else selection.count(",") + 1


def read_limits() -> Limits:
    """Return the limits of the user's settings. Raises UsageError if the settings are invalid."""
    return read_settings().limits

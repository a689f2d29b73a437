"""The user's limits against accidents: GPUs and runs at once, and hours per run.

`limits:` of the settings file sets them. They are no security boundary: the user can change the file.

`engine.gpus.own_limits` counts what the user's runs hold, `engine.jobs.launch` applies the hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.errors import Problem
from engine.base.files import settings_file
from engine.base.units import format_number
from engine.config.schema import Config
from engine.config.settings import read_settings


@dataclass(frozen=True)
class Limit:
    """A limit in force: its `key` and its value."""

    key: str
    value: float

    def __str__(self) -> str:
        return f"limits.{self.key} is {format_number(self.value)} ({settings_file()})"


@dataclass(frozen=True)
class Limits:
    """The limits in force, None for each that the user has not set."""

    gpus: Limit | None = None
    runs: Limit | None = None
    hours: Limit | None = None

    def all(self) -> list[Limit]:
        """Return the limits that are set."""
        return [limit for limit in (self.gpus, self.runs, self.hours) if limit is not None]

    def minutes(self, config: Config) -> tuple[float, str]:
        """Return the time limit of a run in minutes, 0 for none, and what sets it."""
        limit_min = config.queue.time_limit
        if self.hours is None or 0 < limit_min <= 60 * self.hours.value:
            return limit_min, f"queue.time_limit ({limit_min:g} min)"
        return 60 * self.hours.value, f"limits.hours ({self.hours.value:g} h)"

    def problems(self, config: Config, typed: frozenset[str]) -> list[Problem]:
        """Return why a run with this config exceeds a limit whatever else runs. `typed` are the keys that were
        typed."""
        found = []
        wanted, minutes = requested_gpus(config.device.gpus), config.queue.time_limit
        if self.gpus is not None and wanted > self.gpus.value:
            found.append(too_many_gpus(config.device.gpus, wanted, self.gpus))
        if self.hours is not None and "queue.time_limit" in typed and not 0 < minutes <= 60 * self.hours.value:
            text = f"{minutes:g} min" if minutes else "no time limit"
            advice = f"type --time-limit {60 * self.hours.value:g} or less"
            found.append(Problem("queue.time_limit", f"{text} is not allowed: {self.hours}", advice, code="over-limit"))
        return found


NO_LIMITS = Limits()


def too_many_gpus(selection: str, wanted: int, limit: Limit) -> Problem:
    """Return the problem of a run that asks for more GPUs than its user may use at once."""
    advice = "request fewer, or raise the limit there"
    return Problem("device.gpus", f"{selection} asks for {wanted} GPUs: {limit}", advice, code="over-limit")


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
    values = read_settings().limits.model_dump(exclude_none=True)
    return Limits(**{key: Limit(key, value) for key, value in values.items()})

"""The values that a sweep searches for one config key, as typed: `log:1e-3..0.3`, `int:1..8`, `sgd,adamw`.

`settings` parses and validates them, `study` converts them to Optuna's distributions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from engine.base.errors import UsageError
from engine.config.schema import fields

SPACE_FORMS = "LOW..HIGH, log:LOW..HIGH, int:LOW..HIGH, or choices such as sgd,adamw"
# Of a range, unless it holds few integers.
GRID_POINTS = 5
MAX_GRID_POINTS = 1000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?:(log|int):)?({_NUMBER})\.\.({_NUMBER})")
_BRACKETS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}

Value = float | int | str


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included; uniform in the logarithm if `log`."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def probes(self) -> list[Value]:
        """Return the values whose validity stands for all: both ends."""
        return [self.low, self.high]

    def contains(self, value: object) -> bool:
        """Whether a config value lies in the range."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high and not (self.integer and value != int(value))

    def grid(self) -> list[Value]:
        """Return evenly spaced values from the lowest to the highest; all integers if there are few."""
        count = GRID_POINTS
        if self.integer and not self.log:
            count = min(int(self.high - self.low) + 1, MAX_GRID_POINTS)
        shares = [index / (count - 1) for index in range(count)]
        span = self.high / self.low if self.log else self.high - self.low
        values = [self.low * span**share if self.log else self.low + span * share for share in shares]
        # Twelve digits remove what the power adds to a round number, and the ends stay exact.
        rounded = [min(max(float(f"{value:.12g}"), self.low), self.high) for value in values]
        return list(dict.fromkeys(map(round, rounded) if self.integer else rounded))


@dataclass(frozen=True)
class Choices:
    """Some values of a key, as they are typed on the command line."""

    values: tuple[str, ...]

    def grid(self) -> list[Value]:
        """Return all choices."""
        return list(self.values)

    probes = grid


Space = Range | Choices


def parse_space(key: str, text: str, *, integers: bool | None = None) -> Space | None:
    """Parse the SPACE of a key; None if the text is a single value. Raises UsageError if it is neither.

    `integers` says whether a range without `int:` holds integers only; by default, the config key does.
    """
    match = _RANGE.fullmatch(text)
    if match is not None:
        return _range(key, text, match, integers=_takes_integers_only(key) if integers is None else integers)
    # A URL may contain secrets.
    shown = "a text with a URL" if "://" in text else repr(text)
    if re.match(r"(log|int):", text):
        raise UsageError.one(key, f"{shown} is no range: must be {SPACE_FORMS}", code="invalid-value")
    choices = split_choices(text)
    if len(choices) < 2:
        return None
    if "" in choices:
        raise UsageError.one(key, f"{shown} has an empty choice; write null for an empty value", code="missing-value")
    if len(set(choices)) < len(choices):
        raise UsageError.one(key, f"{shown} has the same choice twice", code="duplicate-value")
    return Choices(tuple(choices))


def _range(key: str, text: str, match: re.Match[str], *, integers: bool) -> Range:
    scale, low, high = match[1], float(match[2]), float(match[3])
    integer = scale == "int" or integers
    reason, code = "", "out-of-range"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        reason = " is no range: the first number must be less than the second"
    elif scale == "log" and low <= 0:
        reason = " is no range: a logarithmic range must begin above 0"
    elif integer and (low != int(low) or high != int(high)):
        reason, code = " is no range of integers: use whole numbers", "invalid-value"
    if reason:
        raise UsageError.one(key, f"{text!r}{reason}", code=code)
    kind = int if integer else float
    return Range(kind(low), kind(high), log=scale == "log", integer=integer)


def _takes_integers_only(key: str) -> bool:
    """Whether a config key holds integers and no other numbers."""
    field = dict(fields()).get(key)
    kinds = _flattened(field.annotation) if field is not None else set()
    return int in kinds and float not in kinds


def _flattened(annotation: Any) -> set[Any]:
    """Return a type and all types of its union and annotations."""
    kinds = {annotation} if isinstance(annotation, type) else set()
    return kinds.union(*map(_flattened, get_args(annotation)))


def split_choices(text: str) -> list[str]:
    """Split at the commas that are in no brackets, so that `[30,60],[40,80]` are two choices."""
    parts, depth = [""], 0
    for character in text:
        depth = max(depth + _BRACKETS.get(character, 0), 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def grid_size(spaces: Mapping[str, Space], preset: Mapping[str, Value] | None) -> int:
    """Return the number of trials of a whole grid: its points, and trial 0 with the values `preset` if it is none.

    A script has no `preset`."""
    grids = {key: space.grid() for key, space in spaces.items()}
    is_point = preset is None or (preset.keys() == grids.keys() and all(preset[key] in grids[key] for key in grids))
    return math.prod(map(len, grids.values())) + (not is_point)


def value_text(value: Value) -> str:
    """Return a value as it is typed on the command line; a number keeps all its digits."""
    return value if isinstance(value, str) else repr(value)


def overrides_of(values: Mapping[str, Value]) -> list[str]:
    """Return values by key as `section.key=value` arguments."""
    return [f"{key}={value_text(value)}" for key, value in values.items()]

"""Which values of the user's own metrics are better where their names do not say it: `RUNS/.metrics.json` and flags.

`gputrain runs better` writes the file of a runs folder, and lists, comparisons, reports and plots read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from engine.runs.metrics import METRIC_PREFIX, Better
from engine.utils.codec import ENTRIES, FileRecord, field, find_valid_fields, update_record
from engine.utils.errors import Problem, UsageError

DIRECTIONS_FILE = ".metrics.json"
MAX_DIRECTIONS_BYTES = 1 << 20
DIRECTIONS = {"high": Better.HIGH, "low": Better.LOW}


class MetricDirections(FileRecord, frozen=True, kw_only=True):
    """Content of `.metrics.json` in a runs folder."""

    better: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """Whether `high` or `low` values of one of the user's own metrics are better, by its name."""


def read_directions(root: Path, overrides: Iterable[str] = ()) -> Mapping[str, Better]:
    """Return the directions of the user's own metrics in a runs folder, by name.

    `overrides` are texts such as `f1=high`, which take precedence. Raises UsageError if one is not valid.
    """
    stored = find_valid_fields(root / DIRECTIONS_FILE, MetricDirections, MAX_DIRECTIONS_BYTES) or MetricDirections()
    known = {name: DIRECTIONS[better] for name, better in stored.better.items() if better in DIRECTIONS}
    problems = list[Problem]()
    for text in overrides:
        name, _, better = text.rpartition("=")
        if name and better in DIRECTIONS:
            known[name.removeprefix(METRIC_PREFIX)] = DIRECTIONS[better]
        else:
            problems.append(Problem("--better", f"{text} is not NAME=low or NAME=high", code="invalid-value"))
    if problems:
        raise UsageError(problems)
    return known


def store_direction(root: Path, name: str, better: Better | None) -> None:
    """Store the direction of one of the user's own metrics in a runs folder; None is that of its name.

    Raises UsageError if it cannot be written.
    """
    directions = {known: direction.value for known, direction in read_directions(root).items()}
    directions.pop(name, None)
    if better is not None:
        directions[name] = better.value
    try:
        update_record(root / DIRECTIONS_FILE, MetricDirections(better=directions), MAX_DIRECTIONS_BYTES)
    except OSError as error:
        raise UsageError.one(
            str(root), f"{DIRECTIONS_FILE} cannot be written: {error.strerror}", code="not-writable"
        ) from error

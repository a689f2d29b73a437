"""Which values of the user's own metrics are better, if not those that the name suggests: `.metrics.json`.

`gputrain runs better` writes the file of a runs folder, and lists, comparisons, reports and plots read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from engine.base.codec import ENTRIES, FileRecord, change_record, field, find_record
from engine.base.errors import file_errors
from engine.runs.metrics import Better

DIRECTIONS_FILE = ".metrics.json"
MAX_DIRECTIONS_BYTES = 1 << 20
DIRECTIONS = {"high": Better.HIGH, "low": Better.LOW}


class MetricDirections(FileRecord, frozen=True, kw_only=True):
    """Content of `.metrics.json` in a runs folder."""

    better: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """Whether `high` or `low` values of one of the user's own metrics are better, by its name."""


def read_directions(root: Path) -> Mapping[str, Better]:
    """Return the directions of the user's own metrics in a runs folder, by name."""
    stored = find_record(root / DIRECTIONS_FILE, MetricDirections, MAX_DIRECTIONS_BYTES) or MetricDirections()
    return _valid_directions(stored)


def store_direction(root: Path, name: str, better: Better | None) -> None:
    """Store the direction of one of the user's own metrics in a runs folder; None is that of its name.

    Creates the folder: the directions also hold for the logs of other programs, whose user may have no run of gputrain.
    Raises UsageError if the file is not valid or cannot be written.
    """

    def change(stored: MetricDirections) -> MetricDirections:
        directions = {**_valid_directions(stored), name: better}
        return MetricDirections(better={name: kept.value for name, kept in directions.items() if kept is not None})

    with file_errors(str(root), "cannot be made", code="not-writable"), suppress(FileExistsError):
        root.mkdir(parents=True)
    change_record(root / DIRECTIONS_FILE, str(root), MetricDirections(), change, MAX_DIRECTIONS_BYTES)


def _valid_directions(stored: MetricDirections) -> dict[str, Better]:
    return {name: DIRECTIONS[better] for name, better in stored.better.items() if better in DIRECTIONS}

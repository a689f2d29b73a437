"""The formats that were found in a file, for `gputrain run --try-parse` and the screen of a run."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.text import pluralize
from engine.jobs.command.try_parse import TriedFile


def format_lines(tried: TriedFile) -> Iterator[str]:
    """Yield the formats of a file, the metrics in each, and the skipped lines."""
    for each in tried.formats.values():
        first = each.points[0]
        epoch = "" if first.epoch is None else f", epoch {first.epoch:g}"
        values = ", ".join(f"{point.name} = {point.value:.6g}" for point in each.points)
        yield f"{pluralize(each.count, 'record')} as: {each.example.strip()}"
        yield f"    step {first.step:,}{epoch}: {values}"
    yield from tried.notes
    if tried.unread:
        yield f"left out, {pluralize(tried.num_unread, 'line')} as: {tried.unread[0].strip()}"

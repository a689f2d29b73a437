"""Which charts the user wants to see of foreign runs, by folder. Kept in the user's state folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from engine.utils.codec import FileRecord, Meta, Record, find_user_record, replace, write_user_record
from engine.utils.errors import UsageError
from engine.utils.files import state_folder

CHOICES_FILE = "foreign-charts.json"
MAX_FOLDERS = 200
MAX_CHARTS = 16
MAX_HIDDEN = 200

# A name has at most 300 characters. An escaped character takes up to ten.
ChartId = Annotated[str, Meta(min_length=1, max_length=3000)]


class FolderCharts(Record, frozen=True, kw_only=True):
    """The charts of the runs in one folder, by their ids in `engine.show.charts`.

    Without chosen `charts`, a screen shows the first ones that are not `hidden`.
    """

    folder: Annotated[str, Meta(max_length=4096)]
    charts: Annotated[tuple[ChartId, ...], Meta(max_length=MAX_CHARTS)] = ()
    hidden: Annotated[tuple[ChartId, ...], Meta(max_length=MAX_HIDDEN)] = ()

    def without(self, chart: str) -> FolderCharts:
        """Return the choice without a chart. Beyond `MAX_HIDDEN`, the one that was hidden first is shown again."""
        charts = tuple(each for each in self.charts if each != chart)
        hidden = (*(each for each in self.hidden if each != chart), chart)[-MAX_HIDDEN:]
        return replace(self, charts=charts, hidden=hidden)

    def with_charts(self, charts: tuple[str, ...]) -> FolderCharts:
        """Return the choice with these charts, which are hidden no more."""
        return replace(self, charts=charts, hidden=tuple(each for each in self.hidden if each not in charts))


class ChartChoices(FileRecord, frozen=True, kw_only=True):
    """The folders whose charts were chosen, the latest one last."""

    folders: Annotated[tuple[FolderCharts, ...], Meta(max_length=MAX_FOLDERS)] = ()


def _read_choices() -> tuple[FolderCharts, ...]:
    return (find_user_record(state_folder(), CHOICES_FILE, ChartChoices) or ChartChoices()).folders


def read_chart_choice(folder: Path) -> FolderCharts:
    """Return the charts that the user chose and hid for a folder."""
    key = os.path.realpath(folder)
    found = (choice for choice in _read_choices() if choice.folder == key)
    return next(found, FolderCharts(folder=key))


def save_chart_choice(chosen: FolderCharts) -> None:
    """Remember the charts of a folder, and forget the folder that was chosen for longest ago beyond `MAX_FOLDERS`.

    Raises UsageError if they cannot be written.
    """
    others = [choice for choice in _read_choices() if choice.folder != chosen.folder]
    try:
        choices = ChartChoices(folders=(*others, chosen)[-MAX_FOLDERS:])
        write_user_record(state_folder(), CHOICES_FILE, choices)
    except OSError as error:
        reason = f"The charts cannot be remembered: {error.strerror}"
        raise UsageError.one("", reason, code="not-writable") from error

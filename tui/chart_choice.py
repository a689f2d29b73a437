"""Which charts the user wants to see of foreign runs, by folder. Kept in the user's state folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from engine.utils.codec import FileRecord, Meta, Record, find_valid_user_fields, write_user_record
from engine.utils.errors import UsageError
from engine.utils.files import state_folder

CHOICES_FILE = "foreign-charts.json"
MAX_FOLDERS = 200
MAX_CHARTS = 16

# A name has at most 300 characters. An escaped character takes up to ten.
ChartId = Annotated[str, Meta(min_length=1, max_length=3000)]


class FolderCharts(Record, frozen=True, kw_only=True):
    """The charts of the runs in one folder, by their ids in `engine.show.foreign_charts`."""

    folder: Annotated[str, Meta(max_length=4096)]
    charts: Annotated[tuple[ChartId, ...], Meta(max_length=MAX_CHARTS)]


class ChartChoices(FileRecord, frozen=True, kw_only=True):
    """The folders whose charts were chosen, the latest one last."""

    folders: Annotated[tuple[FolderCharts, ...], Meta(max_length=MAX_FOLDERS)] = ()


def _read_choices() -> tuple[FolderCharts, ...]:
    return (find_valid_user_fields(state_folder(), CHOICES_FILE, ChartChoices) or ChartChoices()).folders


def read_chart_choice(folder: Path) -> tuple[str, ...] | None:
    """Return the charts that the user chose for a folder; None if none were chosen."""
    key = os.path.realpath(folder)
    return next((choice.charts for choice in _read_choices() if choice.folder == key), None)


def save_chart_choice(folder: Path, charts: tuple[str, ...]) -> None:
    """Remember the charts of a folder, and forget the folder that was chosen for longest ago beyond `MAX_FOLDERS`.

    Raises UsageError if they cannot be written.
    """
    key = os.path.realpath(folder)
    others = [choice for choice in _read_choices() if choice.folder != key]
    choices = (*others, FolderCharts(folder=key, charts=charts))[-MAX_FOLDERS:]
    try:
        write_user_record(state_folder(), CHOICES_FILE, ChartChoices(folders=choices))
    except OSError as error:
        reason = f"The charts cannot be remembered: {error.strerror}"
        raise UsageError.one("", reason, code="not-writable") from error

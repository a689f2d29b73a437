"""How the user wants the list of runs: its columns and their order. Kept in the user's state folder."""

from __future__ import annotations

from typing import Annotated

from engine.utils.codec import FileRecord, Meta, field, find_user_record, write_user_record
from engine.utils.errors import UsageError
from engine.utils.files import state_folder

SETTINGS_FILE, FOREIGN_SETTINGS_FILE = "run-list.json", "foreign-run-list.json"

MAX_COLUMNS = 60
# Names of metrics of other programs have up to 300 characters, and a prefix.
ColumnName = Annotated[str, Meta(min_length=1, max_length=400)]


class ListSettings(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """Names of the columns from left to right, and of the column that the list is sorted by.

    `columns` is empty for the default ones, `sort_key` is None for the newest run first. `reverse` is the other
    direction than the usual one of that column.
    """

    columns: Annotated[tuple[ColumnName, ...], Meta(max_length=MAX_COLUMNS)] = ()
    sort_key: ColumnName | None = field(default=None, name="sort")
    reverse: bool = False


def read_list_settings(file: str = SETTINGS_FILE) -> ListSettings:
    """Return the settings that the user chose last; the defaults for those that are missing or invalid."""
    return find_user_record(state_folder(), file, ListSettings) or ListSettings()


def save_list_settings(settings: ListSettings, file: str = SETTINGS_FILE) -> None:
    """Remember the settings. Raises UsageError if they cannot be written."""
    try:
        write_user_record(state_folder(), file, settings)
    except OSError as error:
        raise UsageError.one("", f"The list cannot be remembered: {error.strerror}", code="not-writable") from error

"""How the user wants the list of runs: its columns and their order. Kept in the user's state folder."""

from __future__ import annotations

from dataclasses import dataclass

from engine.utils.errors import UsageError
from engine.utils.files import read_user_json, state_folder, write_user_json

SETTINGS_FILE = "run-list.json"
SETTINGS_FORMAT = 1
MAX_COLUMNS, MAX_NAME_LENGTH = 60, 80


@dataclass(frozen=True)
class ListSettings:
    """Names of the columns from left to right, and of the column that the list is sorted by.

    `columns` is None for the default ones, `sort_key` for the newest run first. `reverse` is the other direction than
    the usual one of that column.
    """

    columns: tuple[str, ...] | None = None
    sort_key: str | None = None
    reverse: bool = False


def read_list_settings() -> ListSettings:
    """Return the settings that the user chose last; the defaults for those that are missing or invalid."""
    stored = read_user_json(state_folder(), SETTINGS_FILE) or {}
    if stored.get("format") != SETTINGS_FORMAT:
        return ListSettings()
    columns, sort_key = stored.get("columns"), stored.get("sort")
    valid = [name for name in columns[:MAX_COLUMNS] if _is_name(name)] if isinstance(columns, list) else None
    return ListSettings(
        tuple(dict.fromkeys(valid)) if valid is not None else None,
        sort_key if _is_name(sort_key) else None,
        stored.get("reverse") is True,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_LENGTH and value.isprintable()


def save_list_settings(settings: ListSettings) -> None:
    """Remember the settings. Raises UsageError if they cannot be written."""
    columns = list(settings.columns) if settings.columns is not None else None
    values = {"format": SETTINGS_FORMAT, "columns": columns, "sort": settings.sort_key, "reverse": settings.reverse}
    try:
        write_user_json(state_folder(), SETTINGS_FILE, values)
    except OSError as error:
        raise UsageError.one("", f"The list cannot be remembered: {error.strerror}", code="not-writable") from error

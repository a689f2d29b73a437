"""The stored config of a run as text: all keys, or those that differ from their defaults.

This module imports the config schema, which takes a fifth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.cells import cell_len
from rich.text import Text

from engine.base.text import printable
from engine.config.command_line import format_value
from engine.config.schema import Config, as_dict, without_unstored
from engine.config.yaml_io import parse_yaml
from engine.report.table import pad
from engine.runs.run_config import default_values
from tui.terminal.palette import ACCENT, MUTED, STRONG

MAX_VALUE_LENGTH = 200
CHANGE_SIGN = "•"


@dataclass(frozen=True)
class ConfigChange:
    """A config key that differs from its default. The values are formatted as on the command line."""

    key: str
    value: str
    default: str


def config_changes(changed: Mapping[str, Any]) -> tuple[ConfigChange, ...]:
    """Return the values of a record that differ from the defaults, in schema order."""
    return tuple(
        ConfigChange(key, format_config_value(changed[key]), format_config_value(default))
        for key, default in default_values().items()
        if key in changed
    )


def change_lines(changes: Sequence[ConfigChange], width: int) -> list[Text]:
    """Return a heading, and the changed config keys with their values, and their defaults where they fit."""
    if not changes:
        return [Text("All config keys have their defaults", MUTED)]
    key_columns = min(max(len(change.key) for change in changes), max(width // 2, 1))
    lines = [Text("Changed config keys", STRONG)]
    for change in changes:
        line = Text.assemble((pad(change.key, key_columns), MUTED), "  ", change.value or "none")
        default = f"  ({change.default or 'none'})"
        if line.cell_len + cell_len(default) <= width:
            line.append(default, MUTED)
        lines.append(line)
    return lines


def config_lines(text: str) -> list[Text]:
    """Return all keys of a stored config by section; the text as it is if that is no config."""
    try:
        stored = parse_yaml(text)
    except yaml.YAMLError:
        return [Text(printable(line)) for line in text.splitlines()]
    lines: list[Text] = []
    values = list(_values(stored))
    width = max(len(key.partition(".")[2]) for key, _, _ in values)
    shown_section = ""
    for key, value, default in values:
        section, _, name = key.partition(".")
        if section != shown_section:
            lines += [Text(""), Text(section, STRONG)] if lines else [Text(section, STRONG)]
            shown_section = section
        changed = value != default
        line = Text.assemble((f"{CHANGE_SIGN if changed else ' '} ", ACCENT), (f"{name:<{width}}  ", MUTED))
        line.append(format_config_value(value) or "none", ACCENT if changed else "")
        if changed:
            line.append(f"   default {format_config_value(default) or 'none'}", MUTED)
        lines.append(line)
    return lines


def _values(stored: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of the schema with its stored value and its default."""
    for section, defaults in without_unstored(as_dict(Config())).items():
        values = stored.get(section) if isinstance(stored, dict) else None
        for name, default in defaults.items():
            yield f"{section}.{name}", values.get(name, default) if isinstance(values, dict) else default, default


def format_config_value(value: Any) -> str:
    """Return a stored value as on the command line, without control characters and shortened; "" for None."""
    # The aliases of YAML can make a small file a value of any length.
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if any(isinstance(part, dict | list) for part in parts):
        return "…"
    text = printable(format_value(value))
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "…"

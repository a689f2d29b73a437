"""The stored config of a run as text: all keys, or those that differ from their defaults.

This module imports the config schema, which takes a fifth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def change_lines(changed: Mapping[str, Any], width: int) -> list[Text]:
    """Return a heading, and the changed values of a record in the order of the schema, with their defaults where they
    fit."""
    changes = [(key, changed[key], default) for key, default in default_values().items() if key in changed]
    if not changes:
        return [Text("All config keys have their defaults", MUTED)]
    key_columns = min(max(len(key) for key, _, _ in changes), max(width // 2, 1))
    lines = [Text("Changed config keys", STRONG)]
    for key, value, default in changes:
        line = Text.assemble((pad(key, key_columns), MUTED), "  ", format_config_value(value) or "none")
        default_text = f"  ({format_config_value(default) or 'none'})"
        if line.cell_len + cell_len(default_text) <= width:
            line.append(default_text, MUTED)
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

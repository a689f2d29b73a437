"""The config of a run as the values that differ from the defaults, which the record of the run has.

The config is data of any user: it is bounded, and no code that it names is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine.base.codec import InvalidRecordError, convert
from engine.base.files import read_bytes
from engine.runs.run_record import ConfigValue

# A complete config has 6 KB. PyYAML takes 5 ms for each KB.
MAX_LISTED_CONFIG_BYTES = 1 << 14
# They differ in each run, and the row already shows them.
OMITTED_KEYS = ("run.name", "run.resume")


def read_changed_config(path: Path) -> dict[str, Any] | None:
    """Return the values of a stored config that differ from their defaults, by `section.key`; None as
    `read_stored_config` does. Keys that the schema does not have are omitted."""
    stored = read_stored_config(path, MAX_LISTED_CONFIG_BYTES)
    return None if stored is None else changed_values(stored)


def read_stored_config(path: Path, max_bytes: int) -> dict[str, Any] | None:
    """Return a config by section, as its file has it; None if the file is missing, a link, too large or no config."""
    # Takes 20 ms to import, and a run list needs it only for a run without a record.
    import yaml

    from engine.config.yaml_io import parse_yaml

    try:
        stored = parse_yaml(read_bytes(path, max_bytes).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return stored if isinstance(stored, dict) else None


def changed_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a parsed config that differ from their defaults, by `section.key`."""
    from engine.config.schema import sections

    changed = {}
    for section in sections():
        values = stored.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in (defaults := _default_section(section)):
                continue
            default = defaults[name]
            # `True == 1`, but a flag is no number.
            if (value != default or isinstance(value, bool) is not isinstance(default, bool)) and _is_bounded(value):
                changed[f"{section}.{name}"] = value
    for key in OMITTED_KEYS:
        changed.pop(key, None)
    return changed


@cache
def _default_section(section: str) -> Mapping[str, Any]:
    from engine.config.schema import default_section, without_unstored

    return without_unstored({section: default_section(section)}).get(section, {})


@cache
def default_values() -> Mapping[str, Any]:
    """Return the default of each config key, by `section.key`. Imports the schema, which takes 0.3 s."""
    from engine.config.schema import sections

    return {f"{section}.{name}": value for section in sections() for name, value in _default_section(section).items()}


def all_values(name: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every config key of a run, by `section.key`, from those that differ from the defaults."""
    return {**default_values(), **changed, "run.name": name}


def _is_bounded(value: Any) -> bool:
    """Whether a value is JSON of limited size. The aliases of YAML can make a small file a value of any size."""
    try:
        convert([value], list[ConfigValue])
    except InvalidRecordError:
        return False
    return True

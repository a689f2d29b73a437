"""The stored config of a run as the values that differ from the defaults, for `engine.runs.run_row`.

A run list reads thousands of configs. PyYAML takes 10 ms for the config that gputrain writes, so its lines are parsed
here, each different line once; a config of any other shape goes to PyYAML. The config is data of any user: it is
bounded, and no code that it names is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from engine.utils.files import read_bytes

# A complete config has 3 KB. PyYAML takes 5 ms for each KB, and seconds for thousands of nested brackets.
MAX_LISTED_CONFIG_BYTES, MAX_YAML_BRACKETS = 1 << 14, 500
MAX_VALUE_PARTS, MAX_VALUE_DEPTH, MAX_VALUE_CHARACTERS = 200, 3, 1000
# They differ in each run, and the row already shows them.
OMITTED_KEYS = ("run.name", "run.resume")

_KEY_LINE = re.compile(r"( {0,2})([A-Za-z_]\w*):(?: (.+))?")
_ITEM_LINE = re.compile(r"  - (.+)")
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_QUOTED = re.compile(r"'([ -&(-~]*)'")
# Without the characters that begin or end another construct of YAML.
_PLAIN = re.compile(r"[A-Za-z_/.][\w./+@=-]*(?: [\w./+@=-]+)*|[\w./+@-]+(?:,[\w./+@-]+)*")
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False, "{}": {}, "[]": []}
_OTHER_WORDS = {"~", ".inf", ".nan", "-.inf", "+.inf"}


class _NotSimpleError(Exception):
    """The config has a line that only PyYAML can parse."""


def read_changed_config(path: Path) -> dict[str, Any] | None:
    """Return the values of a stored config that differ from their defaults, by `section.key`.

    None if the file is missing, a link, too large or no config. Keys that the schema does not have are omitted.
    """
    try:
        text = read_bytes(path, MAX_LISTED_CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None
    stored = parse_config(text)
    return changed_values(stored) if isinstance(stored, dict) else None


def changed_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a parsed config that differ from their defaults, by `section.key`."""
    changed = {}
    for section, defaults in _default_sections().items():
        values = stored.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in defaults:
                continue
            default = defaults[name]
            # `True == 1`, but a flag is no number.
            if (value != default or isinstance(value, bool) is not isinstance(default, bool)) and _is_bounded(value):
                changed[f"{section}.{name}"] = value
    for key in OMITTED_KEYS:
        changed.pop(key, None)
    return changed


@cache
def _default_sections() -> Mapping[str, Mapping[str, Any]]:
    from engine.config.schema import Config, as_dict, without_unstored

    return without_unstored(as_dict(Config()))


@cache
def default_values() -> Mapping[str, Any]:
    """Return the default of each config key, by `section.key`. Imports the schema, which takes 0.3 s."""
    sections = _default_sections().items()
    return {f"{section}.{name}": value for section, values in sections for name, value in values.items()}


def all_values(name: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every config key of a run, by `section.key`, from those that differ from the defaults."""
    return {**default_values(), **changed, "run.name": name}


def parse_config(text: str) -> Any:
    """Return the content of a config file; None if it is not valid YAML, or takes too long to parse."""
    try:
        return _parse_lines(text)
    except _NotSimpleError:
        if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
            return None
        import yaml

        from engine.config.yaml_io import parse_yaml

        try:
            return parse_yaml(text)
        except yaml.YAMLError:
            return None


def _parse_lines(text: str) -> dict[str, dict[str, Any]]:
    """Parse sections of keys with a scalar or a list of scalars, as `engine.config.yaml_io.to_yaml` writes them."""
    sections: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] | None = None
    items: list[Any] | None = None
    for line in text.split("\n"):
        depth, key, value = _parse_line(line)
        if depth < 0:
            continue
        if key is None:
            if items is None:
                raise _NotSimpleError
            items.append(value)
            continue
        if items == []:
            # A key without a value, which is null.
            raise _NotSimpleError
        items = None
        if depth == 0:
            if key in sections or (value is not _MISSING and value != {}):
                raise _NotSimpleError
            values = sections[key] = {}
        elif values is None or key in values:
            raise _NotSimpleError
        else:
            values[key] = items = [] if value is _MISSING else None
            if value is not _MISSING:
                values[key] = value
    if items == []:
        raise _NotSimpleError
    return sections


_MISSING = object()


@lru_cache(maxsize=4096)
def _parse_line(line: str) -> tuple[int, str | None, Any]:
    """Return indentation (-1 for an empty line), key (None for an item of a list) and value (`_MISSING` if none)."""
    if not line:
        return -1, None, None
    if (match := _KEY_LINE.fullmatch(line)) is not None and len(match[1]) != 1:
        return len(match[1]), match[2], _MISSING if match[3] is None else _parse_scalar(match[3])
    if (match := _ITEM_LINE.fullmatch(line)) is not None:
        return 2, None, _parse_scalar(match[1])
    raise _NotSimpleError


def _parse_scalar(text: str) -> Any:
    if text in _WORDS:
        # Nobody may change the container that all configs share.
        return _WORDS[text]
    if (match := _QUOTED.fullmatch(text)) is not None:
        return match[1]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    is_word = text.isascii() and _PLAIN.fullmatch(text) and text.lower() not in _OTHER_WORDS
    if is_word and text.lower() not in _WORDS and not text[0].isdigit() and text[0] not in "+-.=":
        return text
    raise _NotSimpleError


def _is_bounded(value: Any) -> bool:
    """Whether a value is JSON of limited size. The aliases of YAML can make a small file a value of any size."""
    count, waiting = 0, [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        count += 1
        if count > MAX_VALUE_PARTS or depth > MAX_VALUE_DEPTH:
            return False
        if isinstance(part, dict):
            if not all(isinstance(key, str) and len(key) <= MAX_VALUE_CHARACTERS for key in part):
                return False
            waiting += [(item, depth + 1) for item in part.values()]
        elif isinstance(part, list):
            if len(part) > MAX_VALUE_PARTS:
                return False
            waiting += [(item, depth + 1) for item in part]
        elif not _is_scalar(part):
            return False
    return True


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_VALUE_CHARACTERS
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63)

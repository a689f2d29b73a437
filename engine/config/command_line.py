"""Config values as they are typed on the command line, and the command that repeats a stored config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_value(value: Any) -> str:
    """Format a config value as it is typed on the command line; None and {} become an empty string."""
    return "" if value is None or value == {} else shown_value(value)


def shown_value(value: Any) -> str:
    """Format a config value in a message."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def repeat_arguments(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the words of `gputrain run` that resolve to a flat config: each key that differs from its default."""
    changed = {key: value for key, value in config.items() if key in defaults and value != defaults[key]}
    return [f"{key}={format_value(value) or 'null'}" for key, value in changed.items()]

"""Text for terminals: escaped control characters, plurals, durations."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped, like `\\x1b`, so that it cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def pluralize(count: int, noun: str) -> str:
    """Return the count and the noun, with a plural s unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def list_names(names: Sequence[str], limit: int = 3) -> str:
    """Return the first `limit` names separated by commas, and how many more there are: `a, b, c and 5 more`."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 2h05m, 2m41s, 41s."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"

"""Text for terminals: escaped control characters, plurals, lists of names."""

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

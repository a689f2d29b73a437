"""Small helpers for text that is shown to people."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with what is not printable written out, as `\\x1b`."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

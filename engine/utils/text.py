"""Small helpers for text that is shown to people."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with what is not printable written out, as `\\x1b`."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"

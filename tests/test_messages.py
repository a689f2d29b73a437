"""The words of every message, in one place: a rewording changes messages.txt and no other test."""

from __future__ import annotations

from support.messages import CATALOG, format_catalog


def test_messages_equal_catalog() -> None:
    assert format_catalog() == CATALOG.read_text(), "if this is intended: python tests/support/messages.py"

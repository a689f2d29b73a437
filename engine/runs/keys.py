"""How a key is written in a query, `--sort` and `--columns`: as it is, or in double quotes.

`"val f1">0.9` is a condition on the key `val f1`. A double quote in a quoted key is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

KEY_PATTERN = r'[A-Za-z_][\w./@:-]*|"(?:[^"]|"")+"(?!")'
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w./@:-]*")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"(?!")' + r"|'([^']*)'")


def quote_key(key: str) -> str:
    """Return a key as it is written in a query, `--sort` or `--columns`."""
    return key if _PLAIN_KEY.fullmatch(key) else '"' + key.replace('"', '""') + '"'


def parse_key(text: str) -> str:
    """Return the key that is written, as `quote_key` writes it."""
    quoted = _QUOTED.fullmatch(text)
    return text if quoted is None or quoted[1] is None else quoted[1].replace('""', '"')


def unquote(text: str) -> str:
    """Return a text without the quotes around its parts."""
    return _QUOTED.sub(lambda part: part[2] if part[1] is None else part[1].replace('""', '"'), text)


def split_unquoted(text: str, is_separator: Callable[[str], object], quotes: str) -> list[str] | None:
    """Return the parts of a text between separators outside of quotes, with their quotes; None if a quote is open."""
    parts, quote = [""], ""
    for letter in text:
        if not quote and is_separator(letter):
            parts.append("")
            continue
        if quote or letter in quotes:
            quote = "" if letter == quote else quote or letter
        parts[-1] += letter
    return None if quote else [part for part in parts if part.strip()]

"""How a key is written in a query, `--sort`, `--columns`, `--metric` and `runs better`: as it is, or in double quotes.

`"val f1">0.9` is a condition on the key `val f1`, and `metrics."val f1">0.9` one on `metrics.val f1`. A double quote in
a quoted key is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_PREFIX = r"(?:best_)?metrics\."
_PLAIN = r"[^\W\d][\w./@:-]*"
KEY_PATTERN = rf'{_PLAIN}|(?:{_PREFIX})?"(?:[^"]|"")+"(?!")'
_QUOTED_KEY = re.compile(rf'((?:{_PREFIX})?)"((?:[^"]|"")*)"(?!")')
_QUOTED = re.compile(r'"((?:[^"]|"")*)"(?!")' + r"|'([^']*)'")


def quote_key(key: str) -> str:
    """Return a key as it is written in a query, `--sort` or `--columns`."""
    return key if re.fullmatch(_PLAIN, key) else '"' + key.replace('"', '""') + '"'


def parse_key(text: str) -> str:
    """Return the key that is written, as `quote_key` writes it."""
    quoted = _QUOTED_KEY.fullmatch(text)
    return text if quoted is None else quoted[1] + quoted[2].replace('""', '"')


def parse_metric_name(text: str) -> str:
    """Return the name of one of the user's own metrics, which is written as the name or as a key of the metric."""
    return re.sub(rf"\A{_PREFIX}", "", parse_key(text))


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

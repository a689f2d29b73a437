"""Join the lines of an object, of a box, or of an indented block whose step may come last, to one line.

`output_metrics` gives it the lines one after another.
"""

from __future__ import annotations

import re

from engine.watch.line_names import is_position, is_result
from engine.watch.reading import EPOCH_NAMES, STEP_NAMES

MAX_HELD_LINES = 200
# A line of an object of JSON or Python: `'loss': 3,`, `}`
_OBJECT_LINE = re.compile(r"\s*(?:[\"'][^\"']{1,200}[\"']\s*:|[}\])])")
_BLOCK_LINE = re.compile(r"\s+(?P<name>[A-Za-z_][\w./@%-]{0,80})\s*[:=]\s+\S+")
# `|    ep_rew_mean | 9 |`
_BOX_LINE = re.compile(
    r"\s*[|│┃](?P<indent>\s*+)(?P<name>[A-Za-z_][\w@./%()+ -]{0,100})[|│┃](?P<value>[^|│┃]*+)[|│┃]\s*"
)
_AROUND_NUMBER = re.compile(r" (?=\d)|(?<=\d) ")
_BARS = tuple("|│┃")
_AXIS_NAMES = frozenset({*STEP_NAMES, *EPOCH_NAMES})


class JoinedLines:
    """Holds lines until what they belong to is whole."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._form = _OBJECT_LINE
        """What a further line looks like."""
        self._depth = 0
        """Braces of an object that are open."""
        self._box: dict[str, str] = {}
        self._section = ""

    def add(self, text: str, *, may_be_block: bool) -> list[str]:
        """Return the lines that are whole now. A block is none if its heading has a step."""
        row = _BOX_LINE.fullmatch(text) if text.lstrip()[:1] in _BARS else None
        if row is not None and not is_result(row["value"]):
            return self._add_row(row["name"].strip(), row["value"].strip(), is_indented=len(row["indent"]) > 1)
        if self._box:
            return [*self.end(), *self.add(text, may_be_block=may_be_block)]
        if not self._held:
            self._depth = text.count("{") - text.count("}") if text[-1:] in ("{", ",") else 0
            if self._depth > 0:
                self._form = _OBJECT_LINE
            elif may_be_block and text[:1].isspace() and _BLOCK_LINE.fullmatch(text) is not None:
                self._form = _BLOCK_LINE
            else:
                return [text]
        elif len(self._held) >= MAX_HELD_LINES or self._form.match(text) is None:
            return [*self.end(), *self.add(text, may_be_block=may_be_block)]
        else:
            self._depth += text.count("{") - text.count("}")
        self._held.append(text)
        return self.end() if self._form is _OBJECT_LINE and self._depth <= 0 else []

    @property
    def is_holding(self) -> bool:
        """Whether lines are held."""
        return bool(self._held or self._box)

    def _add_row(self, name: str, value: str, *, is_indented: bool) -> list[str]:
        """Add a row of a box, which ends the box of an earlier record."""
        if not value and name.endswith("/"):
            self._section = name
            return []
        # `mean 100 episode reward`
        name = _AROUND_NUMBER.sub("_", self._section + name if is_indented else name)
        ended = self.end() if name in self._box or self._held or len(self._box) >= MAX_HELD_LINES else []
        # A position has no group.
        self._box[name] = f"{name.rpartition('/')[2] if is_position(name) else name} = {value}"
        return ended

    def end(self) -> list[str]:
        """Return the held lines, as one if they are whole."""
        if self._box:
            box, self._box, self._section = self._box, {}, ""
            return [", ".join(box.values())]
        held, self._held = self._held, []
        if self._form is _OBJECT_LINE:
            return [" ".join(text.strip() for text in held)] if held and self._depth <= 0 else held
        names = [match["name"].lower() for text in held if (match := _BLOCK_LINE.match(text)) is not None]
        return held if _AXIS_NAMES.isdisjoint(names) else [", ".join(text.strip() for text in held)]

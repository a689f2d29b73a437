"""Fixtures that spare the tests of screens work whose result Textual discards, or computes again for each app."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest
from textual._compositor import Compositor
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

parse_rules = Stylesheet._parse_rules
render_update = Compositor.render_update
parsed: dict[tuple[object, ...], list[RuleSet]] = {}
"""The rules of each style sheet by its text, place and variables. Textual parses them again for each app."""


def parse_rules_once(sheet: Stylesheet, *place: Any, **options: Any) -> list[RuleSet]:
    key = (*place, *options.items(), *sheet._variables.items())
    if key not in parsed:
        parsed[key] = parse_rules(sheet, *place, **options)
    return parsed[key]


@pytest.fixture(autouse=True)
def few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the first frame of each screen, and later only what a test looks at.

    Without a terminal, Textual draws each frame and discards it, which takes a third of the CPU time.
    """
    drawn: WeakSet[Compositor] = WeakSet()

    def render_first_update(compositor: Compositor, **options: Any) -> object:
        if compositor not in drawn:
            drawn.add(compositor)
            return render_update(compositor, **options)
        compositor._dirty_regions.clear()
        return None

    monkeypatch.setattr(Compositor, "render_update", render_first_update)
    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_rules_once)

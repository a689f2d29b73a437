"""Fixtures that save CPU time, and one for busy machines: toasts that do not expire while a test runs."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest
from textual._compositor import Compositor
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from engine.base.codec import Record, decode, encode
from engine.jobs.launch import preflight_process
from engine.train.data.sources.base import ImageSource

notify = App.notify
parse_rules = Stylesheet._parse_rules
render_update = Compositor.render_update
parsed: dict[tuple[object, ...], list[RuleSet]] = {}
"""The rules of each style sheet by its text, place and variables. Textual parses them again for each app."""


def parse_rules_once(sheet: Stylesheet, *place: Any, **options: Any) -> list[RuleSet]:
    key = (*place, *options.items(), *sheet._variables.items())
    if key not in parsed:
        parsed[key] = parse_rules(sheet, *place, **options)
    return parsed[key]


class PreflightInProcess:
    """The helper of the form that runs the preflight, without a process. Its process is tested in tests/tui/form."""

    def __init__(self) -> None:
        self._sources: dict[str, ImageSource | None] = {}
        self._answer = b""

    def send(self, request: Record) -> None:
        received = decode(encode(request), preflight_process.PreflightRequest)
        self._answer = encode(preflight_process.check_request(received, self._sources))

    def receive(self, kind: type[Record]) -> Record:
        return decode(self._answer, kind)

    def kill(self) -> None:
        """Do nothing: `send` has ended."""

    close = kill


@pytest.fixture
def preflight_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.form.checks.start_helper", lambda *_, **__: PreflightInProcess())


@pytest.fixture(autouse=True)
def parsed_style_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_rules_once)


@pytest.fixture(autouse=True)
def lasting_toasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show each toast for an hour: on a busy machine, its 5 s may pass before the test looks."""
    monkeypatch.setattr(App, "notify", lambda *place, **options: notify(*place, **options | {"timeout": 3600.0}))


@pytest.fixture
def all_frames() -> None:
    """Draw every frame: for tests of what is drawn, or that drawing raises no error."""


@pytest.fixture(autouse=True)
def few_frames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the first frame of each screen, and later only what a test looks at, unless the test uses `all_frames`.

    Without a terminal, Textual draws each frame and discards it, which takes a third of the CPU time.
    """
    if "all_frames" in request.fixturenames:
        return
    drawn: WeakSet[Compositor] = WeakSet()

    def render_first_update(compositor: Compositor, full: bool = False, **options: Any) -> object:
        # A screenshot asks for a full frame.
        if full or compositor not in drawn:
            drawn.add(compositor)
            return render_update(compositor, full, **options)
        compositor._dirty_regions.clear()
        return None

    monkeypatch.setattr(Compositor, "render_update", render_first_update)

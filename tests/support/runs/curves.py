"""Curves of a training from its events."""

from __future__ import annotations

from engine.runs.curves import Curves
from engine.runs.events import Event
from engine.runs.journal_source import JournalPoints


def curves_of(*events: Event) -> Curves:
    """Return the curves of a journal with these events."""
    curves = Curves()
    curves.add([JournalPoints().read(events)])
    return curves

"""Events that a terminal shows and that are never written to the journal: the start of a run and its progress.

`engine.launch` emits them; `engine.runs.event_lines` formats them. `engine.runs.events` has all other events.
"""

from __future__ import annotations

from engine.runs.events import Event
from engine.utils.codec import Count


class RunStarting(Event, frozen=True, kw_only=True, tag="starting"):
    """The run folder exists and its ranks are being set up. Shown on the terminal, never written to the journal."""

    name: str
    """Name of the run."""
    folder: str
    """Path of the run folder."""


class DataDownload(Event, frozen=True, kw_only=True, tag="data_download"):
    """Progress of `data.download` before the run starts. Shown on the terminal."""

    message: str


class BatchSizeFound(Event, frozen=True, kw_only=True, tag="batch_found"):
    """`data.batch_size: auto` is resolved. Shown on the terminal; the run's config holds the number."""

    message: str
    """The batch size, and what limits it."""


class TrainingProgress(Event, frozen=True, kw_only=True, tag="progress"):
    """All ranks have completed a step. Independent of `run.log_every`, whose steps may take minutes."""

    step: Count
    """Global step, counted from 1 over all epochs."""

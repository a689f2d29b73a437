"""Events that a terminal shows and that are never written to the journal: the start of a run and its progress.

`engine.launch` emits them; `engine.runs.event_lines` formats them. `engine.runs.events` has all other events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.runs.events import Event


@dataclass(frozen=True, kw_only=True)
class RunStarting(Event):
    """The run folder exists and its ranks are being set up. Shown on the terminal, never written to the journal."""

    type: ClassVar[str] = "starting"
    name: str
    """Name of the run."""
    folder: str
    """Path of the run folder."""


@dataclass(frozen=True, kw_only=True)
class DataDownload(Event):
    """Progress of `data.download` before the run starts. Shown on the terminal."""

    type: ClassVar[str] = "data_download"
    message: str


@dataclass(frozen=True, kw_only=True)
class BatchSizeFound(Event):
    """`data.batch_size: auto` is resolved. Shown on the terminal; the run's config holds the number."""

    type: ClassVar[str] = "batch_found"
    message: str
    """The batch size, and what limits it."""


@dataclass(frozen=True, kw_only=True)
class TrainingProgress(Event):
    """All ranks have completed a step. Independent of `run.log_every`, whose steps may take minutes."""

    type: ClassVar[str] = "progress"
    step: int
    """Global step, counted from 1 over all epochs."""

"""Word the messages about a run: the sentence that the screen shows, the progress, and the command to go on.

`run_messages` decides when one is sent. All text is plain, escaped and bounded: names and errors come from files.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.base.text import pluralize, printable
from engine.base.units import format_duration
from engine.config.notify_section import Occasion
from engine.runs.monitor import best_text
from engine.runs.run_record import RunRecord

MAX_TITLE_CHARS = 200
MAX_LINE_CHARS = 600
MAX_LINES = 6
Level = Literal["info", "success", "warning", "failure"]

# What a title says of the run, and how serious it is.
_TITLES: dict[Occasion, tuple[str, Level]] = {
    "finished": ("finished", "success"),
    "stopped": ("was stopped", "info"),
    "failed": ("failed", "failure"),
    "restarted": ("restarted after a failure", "warning"),
    "crashed": ("crashed", "failure"),
    "stalled": ("makes no progress", "warning"),
    "slowed": ("is slowed down", "warning"),
    "nan": ("has a loss that is not finite", "warning"),
    "granted": ("has its GPUs", "info"),
    "held": ("is held", "warning"),
}


@dataclass(frozen=True)
class Message:
    """One message: its occasion, a title of one line, and a body of a few."""

    occasion: str
    title: str
    body: str
    level: Level


def make_message(
    occasion: Occasion, sentence: str, host: str, folder: Path, record: RunRecord, *, resumable: bool
) -> Message:
    """Return the message for an occasion. `record` is that of the run in `folder`; `host` is where it runs."""
    words, level = _TITLES[occasion]
    is_end = occasion in ("finished", "stopped", "failed", "crashed")
    bottleneck = record.bottleneck if occasion in ("finished", "stopped") else None
    lines = [
        sentence,
        bottleneck.message if bottleneck else "",
        _progress(record, with_best=occasion != "finished"),
        _command(folder, resumes=is_end and occasion != "finished" and resumable),
    ]
    return Message(occasion, _bound(f"{folder.name} {words} on {host}", MAX_TITLE_CHARS), _join(lines), level)


def make_end_message(occasion: Occasion, name: str, host: str, lines: Sequence[str]) -> Message:
    """Return the message about the end of something other than a run, such as a sweep, `lines` long."""
    words, level = _TITLES[occasion]
    return Message(occasion, _bound(f"{name} {words} on {host}", MAX_TITLE_CHARS), _join(lines[-MAX_LINES:]), level)


def test_message(host: str) -> Message:
    """Return the message of `gputrain doctor --send-test-message`."""
    return Message("test", f"gputrain on {host}", "This is a test. Messages about your runs arrive here.", "info")


def stall_sentence(record: RunRecord, seconds: float, watchdog_s: float) -> str:
    """Return how many seconds a run has made no progress, where it stands, and what will end it."""
    phase = f" ({record.phase})" if record.phase else ""
    place = f"after step {record.count('step'):,} in epoch {record.current_epoch}{phase}"
    sentence = f"no progress for {format_duration(seconds)} {place}"
    if watchdog_s > seconds:
        sentence += f"; the watchdog ends the run after {format_duration(watchdog_s)} (run.watchdog)"
    return sentence


def granted_sentence(gpus: Sequence[str], waited_s: float) -> str:
    """Return which GPUs a run got, and how long it waited for them."""
    return f"{pluralize(len(gpus), 'GPU')} after a wait of {format_duration(waited_s)}: {', '.join(gpus)}"


def _progress(record: RunRecord, *, with_best: bool) -> str:
    if not (planned := record.count("total_epochs")):
        return ""
    text = f"{record.count('epochs')} of {pluralize(planned, 'epoch')} in {format_duration(record.seconds)}"
    if with_best and (best := best_text(record)):
        text += f", {best}"
    return text


def _command(folder: Path, *, resumes: bool) -> str:
    command = "resume" if resumes else "attach"
    return f"gputrain {command} {shlex.quote(folder.name)} --runs-dir {shlex.quote(str(folder.parent))}"


def _join(lines: Sequence[str]) -> str:
    return "\n".join(_bound(line, MAX_LINE_CHARS) for line in lines if line)


def _bound(text: str, max_chars: int) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"

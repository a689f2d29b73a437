"""How a run is doing in a few values: what it has reached, why it failed, and the command that comes next.

`gputrain runs show` and `gputrain wait` print them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated

from engine.base.codec import ENTRIES, Finite, Integer, Record
from engine.runs.folder import ENDED_BADLY, RunFolder, RunState
from engine.runs.metrics import Better, figures_of
from engine.runs.root import runs_root
from engine.runs.run_row import RunRow

MAX_FIGURES = 40
MAX_LINES = 20
MAX_LINE_CHARS = 500
# They describe the plan or the devices of a run, not what it has reached. The record has them.
NO_FIGURES = frozenset({"total_epochs", "steps", "gpus", "ranks", "global_batch", "parameters", "queue_place"})
Figures = Annotated[dict[str, Finite], ENTRIES]


class RunFailure(Record, frozen=True, kw_only=True):
    """Why a run failed or crashed, or why its wait was interrupted."""

    cause: str
    """What happened, in one sentence."""
    code: str
    """Kind of failure, such as out-of-memory, which stays the same when the text changes; "" if unknown."""
    rank: Integer | None
    """Rank that failed; null if the run has none or that is unknown."""
    lines: tuple[str, ...]
    """At most 20 last lines: of the traceback or the output of that rank, else of the log."""


class RunOutcome(Record, frozen=True, kw_only=True):
    """What a run has reached, why it failed, and what to do."""

    figures: Figures
    """Key of a metric to its newest value, at most 40: a key of gputrain such as best_val_accuracy, or metrics.NAME and
    best_metrics.NAME of one that the run calls NAME. Conditions, `--columns` and `--sort` take the same keys, and NAME
    alone where no other key has that name."""
    failure: RunFailure | None
    """Why it failed; null if it did not."""
    remedy: str
    """The command that continues or releases the run, of one that failed once the cause is mended; "" if there is
    none."""


def find_outcome(folder: RunFolder, row: RunRow, directions: Mapping[str, Better]) -> RunOutcome:
    """Return the outcome of a run. `directions` are those of the user's own metrics. Reads the journal of a run that
    failed."""
    failure = _find_failure(folder, row) if row.state in ENDED_BADLY else None
    figures = [(each.key, value) for each, value in figures_of(row.record, directions) if each.key not in NO_FIGURES]
    return RunOutcome(figures=dict(figures[:MAX_FIGURES]), failure=failure, remedy=_remedy(folder, row))


def _find_failure(folder: RunFolder, row: RunRow) -> RunFailure:
    # Events take 20 ms to import, and few runs fail.
    from engine.base.colors import without_colors
    from engine.runs.events import RankFailed, SessionStarted
    from engine.runs.journal import SESSION_TYPES, JournalReader
    from engine.train.distributed.aborts import read_log_tail

    found: RankFailed | None = None
    for event in JournalReader(folder.journal).poll(kinds=(RankFailed, *SESSION_TYPES)):
        if isinstance(event, RankFailed):
            found = event
        elif isinstance(event, SessionStarted):
            # Of an earlier session, or before a restart.
            found = None
    text = found.traceback if found is not None else ""
    lines = [line for line in (text or read_log_tail(folder.log, 0)).splitlines() if line.strip()]
    shown = tuple(without_colors(line[:MAX_LINE_CHARS]) for line in lines[-MAX_LINES:])
    if found is None or row.state != RunState.FAILED:
        # The failure of a rank did not end a run that crashed later.
        return RunFailure(cause=row.message, code="", rank=None, lines=shown)
    return RunFailure(cause=found.cause, code=found.code, rank=found.rank, lines=shown)


def _remedy(folder: RunFolder, row: RunRow) -> str:
    """Return the command that a person would type next."""
    match row.state:
        case RunState.PAUSED:
            command = "runs continue"
        case RunState.WAITING:
            command = "queue release" if is_held(folder) else ""
        case RunState.INTERRUPTED:
            command = "queue resume"
        case RunState.STOPPED | RunState.CRASHED | RunState.FAILED if folder.resumable:
            command = "resume"
        case _:
            command = ""
    if not command:
        return ""
    path = folder.path
    where = "" if path.parent == runs_root() else f" --runs-dir {shlex.quote(str(path.parent))}"
    return f"gputrain {command} {shlex.quote(path.name)}{where}"


def is_held(folder: RunFolder) -> bool:
    """Whether the user, or failed jobs of its batch, hold a waiting run in the queue."""
    from engine.jobs.queue.state import read_queue_state

    state = read_queue_state(folder)
    return state is not None and (state.held or bool(state.crash_hold))

"""The trials of a sweep as one row of a run list, which otherwise has more trials than runs.

`gputrain runs` and the run list of the screen fold the rows that they show. `RunFolder.sweep` decides which runs are
trials, and `engine.jobs.sweeps` runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Annotated

from engine.base.codec import FileRecord, Meta, find_record, replace
from engine.runs.folder import RunState
from engine.runs.monitor import record_monitor
from engine.runs.run_row import RunRow

BEST_TRIAL_FILE = "best.json"
MAX_BEST_TRIAL_BYTES = 4096
UNSHARED_KEYS = ("images_per_second", "rate_now", "eta_seconds")
"""Numbers of the best trial that say nothing about its sweep."""


def group_trials(rows: Iterable[RunRow]) -> dict[str, list[RunRow]]:
    """Return the trials of each sweep that has more than one trial among the rows, by the name of the sweep."""
    sweeps: dict[str, list[RunRow]] = {}
    for row in rows:
        if row.sweep:
            sweeps.setdefault(row.sweep, []).append(row)
    return {name: trials for name, trials in sweeps.items() if len(trials) > 1}


def fold_trials(rows: Sequence[RunRow], opened: Container[str] = ()) -> list[RunRow]:
    """Return the rows with one row for the trials of each sweep, in the place of its first trial.

    The trials of `opened` sweeps follow their row. A sweep of which only one trial is among the rows has no row.
    """
    sweeps, folded = group_trials(rows), list[RunRow]()
    if not sweeps:
        return list(rows)
    for row in rows:
        trials = sweeps.get(row.sweep)
        if trials is None:
            folded.append(row)
        elif row is trials[0]:
            folded += [make_sweep_row(trials), *(trials if row.sweep in opened else ())]
    return folded


class BestTrial(FileRecord, frozen=True, kw_only=True):
    """Content of `best.json` in the folder of a sweep."""

    run: Annotated[str, Meta(max_length=255)]
    """Name of the run of the best trial so far."""


def best_trial(trials: Sequence[RunRow]) -> RunRow:
    """Return the trial that the sweep recorded as its best one, else the best one by the monitor of the
    trials. A single run is its own best one, also if it is no trial."""
    if len(trials) == 1:
        return trials[0]
    sweep = Path(trials[0].folder).with_name(trials[0].sweep)
    recorded = find_record(sweep / BEST_TRIAL_FILE, BestTrial, MAX_BEST_TRIAL_BYTES)
    if recorded is not None and (best := next((row for row in trials if row.name == recorded.run), None)) is not None:
        return best
    metric = record_monitor(trials[0].record)
    return max(
        trials, key=lambda row: metric.rank(metric.of_run(row.record), row.record.values.get("best_epoch_val_loss"), 0)
    )


def make_sweep_row(trials: Sequence[RunRow]) -> RunRow:
    """Return the row of a sweep: the metrics and the config of its best trial, and the state of all of them."""
    best = best_trial(trials)
    counts = Counter(row.state for row in trials)
    states = dict.fromkeys([RunState.RUNNING, *(row.state for row in trials if row.live), RunState.FINISHED])
    state = next((state for state in states if counts[state]), trials[0].state)
    reasons = {row.message for row in trials} if len(counts) == 1 and not counts[RunState.FINISHED] else set()
    message = ", ".join(f"{count} {name}" for name, count in counts.items())
    starts = [row.record.started_at for row in trials if row.record.started_at is not None]
    updates = [row.record.updated_at for row in trials if row.record.updated_at is not None]
    values = {key: value for key, value in best.record.values.items() if key not in UNSHARED_KEYS}
    return best._replace(
        name=best.sweep,
        sweep="",
        trials=len(trials),
        folder=str(Path(best.folder).with_name(best.sweep)),
        state=str(state),
        message=f"{message}: {reasons.pop()}" if len(reasons) == 1 else message,
        record=replace(
            best.record,
            values=values | {"seconds": sum(row.record.seconds for row in trials)},
            bottleneck=None,
            phase="",
            started_at=max(starts, default=None),
            updated_at=max(updates, default=None),
        ),
        unreadable=False,
        foreign=next((row.foreign for row in trials if row.foreign is not None), None),
        tags=tuple(tag for tag in best.tags if all(tag in row.tags for row in trials)),
        note="",
        archived=all(row.archived for row in trials),
    )

"""One run as a row: name, state, progress, results, config and labels, for `gputrain runs` and the screens.

`engine.runs.index` keeps the rows of ended runs, `engine.runs.query` filters and sorts them, `tui.text.runs` formats
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.runs.claim import MAX_TEXT_CHARS, observe_claim, read_claim
from engine.runs.folder import LIVE_STATES, RunFolder, RunState, session_start
from engine.runs.labels import read_labels
from engine.runs.sinks import file_system_problem
from engine.utils.codec import find_valid_fields, or_none
from engine.utils.text import format_duration, printable

if TYPE_CHECKING:
    from engine.runs.events import RunFinished
    from engine.runs.history import History, RunSummary
    from engine.runs.watcher import RunWatcher

# The readings of one GPU take 400 bytes.
MAX_SUMMARY_BYTES = 1 << 22
# Shared by the rows whose config is not known; nobody changes it.
NO_CONFIG: Mapping[str, Any] = {}
# A live run with a problem of its disk has no news if its journal is older than this.
NO_NEWS_SECONDS = 2.0


class RunRow(NamedTuple):
    """State and results of one run. A tuple: 10,000 of them are made in 15 ms, those of a frozen dataclass in 80 ms.

    `eta_seconds` is the remaining time at the latest throughput. `step` of `steps` is the global step. `bottleneck` is
    the bottleneck message, `data_wait` the share of the training time spent waiting for data, `mfu` the model FLOPs
    utilization. `message` says why the run ended, why its files are `unreadable`, or why a live run records nothing.
    `foreign` is why other users can change the run, None if they cannot. `cpu_fallback` is why it trains on the CPU
    although the host has GPUs. `phase` is what its ranks do: training, validating, saving, or "" if unknown or ended.
    `current_epoch` is the epoch that they are in, and `grad_norm` the latest norm of the gradient. `seconds` is the
    duration of all sessions, without pauses.

    `sweep` is the sweep that the run is a trial of, "" if it is none. A row that stands for a sweep has `trials`, their
    number (`engine.runs.trials`).

    `config` holds the config values that differ from the defaults, by `section.key`, if `config_known`. `tags`, `note`
    and `archived` are the labels of the run. `started_at` is the start of the latest session, by which lists are
    ordered, and `updated_at` the time of its last event, in Unix seconds. `gpus` is the number of GPUs, 0 on the CPU,
    and `ranks` the number of ranks; they are None before the run starts.
    """

    name: str
    state: str
    epoch: int
    epochs: int | None
    best_val_accuracy: float | None
    folder: str
    val_accuracy: float | None = None
    val_loss: float | None = None
    step: int = 0
    steps: int | None = None
    images_per_second: float | None = None
    eta_seconds: float | None = None
    message: str = ""
    data_wait: float | None = None
    mfu: float | None = None
    bottleneck: str | None = None
    unreadable: bool = False
    foreign: str | None = None
    cpu_fallback: str = ""
    phase: str = ""
    current_epoch: int = 0
    best_epoch: int | None = None
    grad_norm: float | None = None
    seconds: float = 0.0
    config: Mapping[str, Any] = NO_CONFIG
    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False
    started_at: float | None = None
    updated_at: float | None = None
    gpus: int | None = None
    ranks: int | None = None
    train_loss: float | None = None
    global_batch: int | None = None
    parameters: int | None = None
    host: str = ""
    config_known: bool = False
    metrics: Mapping[str, float | None] = NO_CONFIG
    sweep: str = ""
    trials: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON values."""
        values: dict[str, object] = {**self._asdict(), "age_seconds": self.age_seconds}
        del values["trials"]
        return values | {"tags": list(self.tags)}

    @property
    def live(self) -> bool:
        """Whether a process owns the run."""
        return self.state in LIVE_STATES

    @property
    def age_seconds(self) -> float:
        """Seconds since the latest session started; since the last event if the start is unknown, 0 if both are."""
        return age_of(self.updated_at if self.started_at is None else self.started_at)


def make_run_row(watcher: RunWatcher, config: Mapping[str, Any] | None = None) -> RunRow:
    """Poll the run and return its current row, with its config, which is read unless it is known.

    An error in one run must not hide the others.
    """
    folder = watcher.folder
    try:
        row = row_of_history(folder, watcher.poll(), partial=watcher.partial, problem=watcher.problem)
        if config is None:
            # Imports the config schema, which the first frame of the screen does without.
            from engine.runs.run_config import read_changed_config

            config = read_changed_config(folder.config)
        return row if config is None else row._replace(config=config, config_known=True)
    except Exception as error:
        return unreadable_row(folder, f"cannot be read: {type(error).__name__}: {error}")


def row_of_history(folder: RunFolder, history: History, *, partial: bool, problem: str | None) -> RunRow:
    """Build the row from the history; if it is `partial`, the rest comes from summary.json. It has no `config`.

    `problem` says why the journal cannot be read.
    """
    # The first frame of the screen does without events and their history.
    from engine.runs.history import RunSummary

    stored = read_summary(folder) if partial else RunSummary()
    epoch, best, started = (history.epochs[-1] if history.epochs else None), history.best, history.started
    best_values = (best.selection_accuracy if best else None, or_none(stored.best_val_accuracy))
    accuracies = [value for value in best_values if value is not None]
    state = folder.state(history)
    # A partial history lacks the GPU samples that date a throttle, so use the stored bottleneck.
    bottleneck = or_none(stored.bottleneck) if partial else history.bottleneck
    is_paused = state is RunState.PAUSED
    labels, updated_at = read_labels(folder), last_activity(folder)
    rate = history.latest_step.images_per_second if history.latest_step else epoch.images_per_second if epoch else None
    return RunRow(
        name=folder.name,
        state=str(state),
        epoch=epoch.epoch if epoch else stored.epochs,
        epochs=started.epochs if started else None,
        best_val_accuracy=max(accuracies, default=None),
        folder=str(folder.path),
        val_accuracy=epoch.val_accuracy if epoch else or_none(stored.val_accuracy),
        val_loss=epoch.val_loss if epoch else or_none(stored.val_loss),
        step=history.steps_done,
        steps=started.epochs * started.steps_per_epoch if started else None,
        images_per_second=None if is_paused else rate,
        eta_seconds=history.eta_s if state.live and not is_paused else None,
        message=problem
        or claim_message(folder, history, state)
        or state_message(history, state)
        or (recording_problem(folder, history) if state.live else ""),
        data_wait=history.data_wait,
        mfu=history.mfu,
        bottleneck=bottleneck.message if bottleneck else None,
        unreadable=problem is not None,
        foreign=folder.owner_problem(),
        cpu_fallback=history.cpu_fallback or stored.cpu_fallback,
        phase=history.phase if state.live else "",
        # A checkpoint after the last epoch is at the beginning of the next one.
        current_epoch=min(history.current_epoch, started.epochs) if started else history.current_epoch,
        best_epoch=or_none(stored.best_epoch) if partial else best.epoch if best else None,
        grad_norm=or_none(history.latest_step.grad_norm) if history.latest_step else None,
        seconds=stored.seconds if partial else round(history.total_seconds, 3),
        tags=labels.tags,
        note=labels.note,
        archived=labels.archived,
        started_at=session_start(folder) or (started.time if started else None),
        updated_at=updated_at,
        gpus=len(set(started.devices) - {"cpu"}) if started else None,
        ranks=started.world_size if started else None,
        train_loss=epoch.train_loss if epoch else or_none(stored.train_loss),
        global_batch=started.global_batch if started else None,
        parameters=started.parameters if started else None,
        host=started.host if started else "",
        metrics=epoch.metrics if epoch else stored.metrics,
        sweep=folder.sweep,
    )


def read_summary(folder: RunFolder) -> RunSummary:
    """Return the stored summary of a run; one of defaults if there is none."""
    from engine.runs.history import RunSummary

    return find_valid_fields(folder.summary, RunSummary, MAX_SUMMARY_BYTES) or RunSummary()


def unreadable_row(folder: RunFolder, message: str) -> RunRow:
    """Return the row of a run whose files cannot be read."""
    return RunRow(
        name=folder.name,
        state=RunState.CRASHED,
        epoch=0,
        epochs=None,
        best_val_accuracy=None,
        folder=str(folder.path),
        message=message,
        unreadable=True,
        foreign=folder.owner_problem(),
        sweep=folder.sweep,
    )


def claim_message(folder: RunFolder, history: History, state: RunState) -> str:
    """Return what is known of the process on another host that claims the run; empty if none does."""
    if not (state.live or state is RunState.CRASHED):
        return ""
    observed = observe_claim(folder.owner)
    if observed is None:
        return ""
    claim = observed.claim
    if state is RunState.CRASHED:
        flag = " --take-over" if claim.is_recent else ""
        last = f"no more heartbeats from {claim.process} (the last one: {claim.last_heartbeat()})"
        return f"{last}; `gputrain resume{flag}` resumes from the last checkpoint"
    return f"the clocks differ: heartbeat of {claim.process}: {claim.last_heartbeat()}" if claim.is_in_future else ""


def state_message(history: History, state: RunState) -> str:
    """Return why a run waits or ended; empty while it trains."""
    if state is RunState.WAITING and history.waiting is not None:
        return history.waiting.message
    if state is RunState.INTERRUPTED:
        return "its supervisor was killed while it waited; `gputrain queue resume` starts it again"
    return end_message(history.finished, state)


def recording_problem(folder: RunFolder, history: History) -> str:
    """Return why a live run cannot record; "" if it can."""
    # Not the time of the file: on tmpfs, a write to a full disk changes it.
    age_s = age_of(history.latest_time)
    claim = read_claim(folder.owner)
    problem = "" if claim is None else printable((claim.problem or "")[:MAX_TEXT_CHARS])
    if not problem and age_s >= NO_NEWS_SECONDS:
        # On some file systems, an owner can write nothing at all to a full disk.
        problem = file_system_problem(folder.root) or ""
    if not problem:
        return ""
    news = f"no news for {format_duration(age_s)}: " if age_s >= NO_NEWS_SECONDS else ""
    return f"{news}{problem}; the run goes on, and stop works"


def end_message(finished: RunFinished | None, state: RunState) -> str:
    """Return why a run ended; empty while it is live."""
    if state is RunState.CRASHED:
        return "supervisor exited unexpectedly; `gputrain resume` resumes from the last checkpoint"
    return finished.message if finished is not None and not state.live else ""


def last_activity(folder: RunFolder) -> float | None:
    """Return when the journal was last written, or the run started, in Unix seconds; None if neither is known."""
    mtimes = []
    for path in (folder.journal, folder.lock):
        try:
            mtimes.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(mtimes, default=None)


def age_of(past: float | None) -> float:
    """Return seconds since a time in Unix seconds; 0 if it is unknown or in the future."""
    return 0.0 if past is None else round(max(time.time() - past, 0.0), 1)

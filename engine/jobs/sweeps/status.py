"""The state of a sweep for its commands and its screen: its trials and the best one.

A `SweepReader` reads only what is new at each poll, and writes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from engine.jobs.sweeps.controller import STATE_WORDS
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.settings import SweepSettings, read_settings
from engine.jobs.sweeps.space import Value
from engine.jobs.sweeps.study import CODE, PRESET, REASON, VAL_LOSS, SweepStudy, journal_errors, open_study
from engine.runs.folder import RunState
from engine.runs.run_record import read_run_record

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from engine.runs.metrics import Metric


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    `run` is the name of its run. `state` is running, stopped, complete, pruned or failed; a stopped trial goes on when
    the sweep is continued. `value` is the metric of the best epoch if the trial is complete, else of its latest epoch;
    None without an epoch. `val_loss` is the validation loss of the best epoch, None if it is unknown. `epoch` is the
    latest recorded epoch, or step of a script's metric. `preset` marks the config itself. `reason` says why the trial
    was pruned or failed, or that it diverged, and `code` is the kind of this reason. `seconds` is the time since its
    start, or from its start to its end.
    """

    number: int
    run: str
    state: str
    value: float | None
    epoch: int
    params: Mapping[str, Value]
    preset: bool
    reason: str
    code: str
    seconds: float | None
    val_loss: float | None = None

    def rank(self, metric: Metric) -> tuple[float, float, float]:
        """Return what is larger for the better one of two trials, see `Metric.rank`, of equals for the first one."""
        return metric.rank(self.value, self.val_loss, -self.number)


@dataclass(frozen=True)
class SweepStatus:
    """A sweep at one moment.

    `trials` are in the order of their numbers. `best` is the completed trial with the best value. `counts` is the
    number of trials by state. `running` means that a controller or jobs run it. `started_at` is the start of
    trial 0 in Unix seconds. `importances` are shares of 1 (`SweepStudy.importances`). `curves` has the epochs or steps
    of each trial with their values, NaN for one that is not finite. `message` is what its jobs say.
    """

    name: str
    folder: str
    running: bool
    settings: SweepSettings
    counts: Mapping[str, int]
    best: TrialRow | None
    trials: tuple[TrialRow, ...]
    started_at: float | None = None
    importances: Mapping[str, float] = field(default_factory=dict)
    curves: Sequence[Mapping[int, float]] = ()
    message: str = ""

    @property
    def state(self) -> str:
        """What it does: running, ended, or not running although trials are left."""
        return "running" if self.running else "ended" if self.done >= self.settings.trials else "not running"

    @property
    def done(self) -> int:
        """The number of trials that have ended for good."""
        return sum(row.state not in ("running", "stopped") for row in self.trials)

    def by_value(self) -> list[TrialRow]:
        """Return the trials, the best value first and those without a value last."""
        order = ("failed", "pruned", "stopped", "running", "complete")
        metric = self.settings.objective
        return sorted(self.trials, key=lambda row: (order.index(row.state), row.rank(metric)), reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `gputrain sweep show --json`: all but the curves."""
        values = asdict(replace(self, curves=()))
        del values["curves"]
        return values

    def summary(self) -> dict[str, Any]:
        """Return the JSON of the sweep in `gputrain sweep list --json`."""
        return {
            "name": self.name,
            "folder": self.folder,
            "state": self.state,
            "done": self.done,
            "trials": self.settings.trials,
            "metric": self.settings.metric_name,
            "best": None if self.best is None else self.best.value,
            "best_run": None if self.best is None else self.best.run,
            "started_at": self.started_at,
        }


class SweepReader:
    """Reads a sweep repeatedly. `folder` must have been found with `find_sweep`, which checks its owner."""

    def __init__(self, folder: SweepFolder) -> None:
        self.folder = folder
        self._study: SweepStudy | None = None
        self._importances: tuple[int, dict[str, float]] = (0, {})
        """Those of a number of completed trials."""

    def poll(self) -> SweepStatus:
        """Return the current status. Raises UsageError if the files of the sweep are not valid."""
        # The number of trials may change while the sweep runs.
        settings = read_settings(self.folder.settings)
        if self._study is None and self.folder.journal.exists():
            self._study = open_study(self.folder, settings)
        view = None if (running := self.folder.is_owned()) else self.folder.job_view(RunState.WAITING)
        running = running or (view is not None and view.is_open)
        with journal_errors(self.folder.journal):
            trials = [] if self._study is None else self._study.trials()
        rows = tuple(self._row(trial, has_controller=running) for trial in trials)
        complete = [row for row in rows if row.state == "complete" and row.value is not None]
        started = trials[0].datetime_start if trials else None
        if self._study is not None and self._importances[0] != len(complete):
            self._importances = len(complete), self._study.importances()
        return SweepStatus(
            name=self.folder.name,
            folder=str(self.folder.path),
            running=running,
            message="" if view is None else view.message,
            settings=settings,
            trials=rows,
            best=max(complete, key=lambda row: row.rank(settings.objective), default=None),
            counts=dict(Counter(row.state for row in rows)),
            started_at=None if started is None else started.timestamp(),
            importances=self._importances[1],
            curves=[trial.intermediate_values for trial in trials],
        )

    def _row(self, trial: FrozenTrial, *, has_controller: bool) -> TrialRow:
        run, epoch, state = self.folder.trial(trial.number), trial.last_step or 0, STATE_WORDS[trial.state.name]
        value = trial.value if trial.value is not None else trial.intermediate_values.get(epoch)
        ended = trial.datetime_complete or datetime.now()
        if state == "running" and not has_controller and not run.is_owned():
            # The next controller records how the run has ended.
            record = read_run_record(run)
            state = "stopped"
            ended = datetime.fromtimestamp(record.updated_at) if record and record.updated_at is not None else ended
        past_s = None if trial.datetime_start is None else (ended - trial.datetime_start).total_seconds()
        val_loss = trial.user_attrs.get(VAL_LOSS)
        return TrialRow(
            number=trial.number,
            run=run.name,
            state=state,
            value=value if value is not None and math.isfinite(value) else None,
            epoch=epoch,
            params=dict(trial.params),
            preset=bool(trial.user_attrs.get(PRESET)),
            reason=str(trial.user_attrs.get(REASON, "")),
            code=str(trial.user_attrs.get(CODE, "")),
            # Negative if the clock was set back since.
            seconds=None if past_s is None else round(max(past_s, 0.0), 1),
            val_loss=None if val_loss is None else float(val_loss),
        )

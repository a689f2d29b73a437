"""The Optuna study of a sweep, in the journal file of its folder: propose, record and compare trials.

The journal is JSON lines; Optuna unpickles nothing from it (only its Redis backend has pickled snapshots, and only its
CMA-ES sampler pickled state). The controller is the only writer and holds the lock of the sweep, so Optuna's own lock
file, which a killed process leaves behind for 30 s, is not used.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.runs.metrics import Better
from engine.sweeps.folder import SweepFolder
from engine.sweeps.settings import SweepSettings
from engine.sweeps.space import Range, Space, Value
from engine.utils.errors import Problem, UsageError
from engine.utils.libraries import import_library

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

STUDY_NAME = "sweep"
# 100,000 trials of 100 epochs write 1.5 GB; what is larger is no journal of a sweep.
MAX_JOURNAL_BYTES = 1 << 31
# `median`: trials that must have finished, and the part of the epochs that each trial trains at least, one in three.
MIN_FINISHED_TRIALS = 5
WARMUP_PART = 3
# Rungs of `asha`: at 1/9, 1/3 and all of the epochs, the best third goes on.
REDUCTION_FACTOR = 3
RUNGS = 2
MIN_TRIALS_FOR_IMPORTANCE = 4
# Attributes of a trial in the journal.
RUN, PRESET, REASON, CODE, PRUNED_AT, CRASHES = "run", "preset", "reason", "code", "pruned_at", "crashes"
GPUS, VAL_LOSS = "gpus", "val_loss"


def require_optuna() -> None:
    """Raise UsageError if Optuna is not installed, or cannot be imported."""
    import_library("optuna", "sweep")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log, and its warnings about experimental arguments."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def journal_errors(path: Path) -> Iterator[None]:
    """Raise UsageError for invalid lines of a journal, which raise whatever the replay of their values raises."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = f"is not a journal of Optuna: {type(error).__name__}: {error}"
        raise UsageError.one(str(path), reason, code="wrong-format") from error


def open_study(folder: SweepFolder, settings: SweepSettings, *, create: bool = False) -> SweepStudy:
    """Open the study of a sweep. With `create`, the caller is the controller: a missing study is created, and a last
    line that a crash left incomplete is removed. Raises UsageError if there is none or it is not valid."""
    require_optuna()
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path = folder.journal
    _check_journal(folder, create=create)
    with _quiet(), journal_errors(path):
        # Only this process writes the journal.
        backend = JournalFileBackend(str(path), lock_obj=cast(Any, threading.Lock()))
        storage = optuna.storages.JournalStorage(backend)
        directions = optuna.study.StudyDirection
        direction = directions.MINIMIZE if settings.objective.better is Better.LOW else directions.MAXIMIZE
        if create and not storage.get_all_studies():
            study = optuna.create_study(storage=storage, study_name=STUDY_NAME, direction=direction)
        else:
            study = optuna.load_study(storage=storage, study_name=STUDY_NAME)
    return SweepStudy(study, settings)


def _check_journal(folder: SweepFolder, *, create: bool) -> None:
    """Check that the journal is a regular file, and remove an incomplete last line. Raises UsageError."""
    flags = (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(folder.journal, flags, 0o644)
    except FileNotFoundError as error:
        raise UsageError.one(folder.name, "has no trial yet", code="no-journal") from error
    except OSError as error:
        raise UsageError.one(str(folder.journal), f"cannot be opened: {error.strerror}", code="not-readable") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JOURNAL_BYTES:
            raise UsageError.one(str(folder.journal), "is not a journal of Optuna", code="wrong-format")
        if create:
            os.ftruncate(handle, _end_of_last_line(handle, status.st_size))
    finally:
        os.close(handle)


def _end_of_last_line(handle: int, size: int) -> int:
    block = 1 << 16
    end = size
    while end > 0:
        start = max(end - block, 0)
        position = os.pread(handle, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def first_values(settings: SweepSettings) -> dict[str, Value]:
    """Return what the sampler proposes for the first trial."""
    import optuna

    with _quiet():
        values = SweepStudy(optuna.create_study(), settings).propose()
    assert values is not None  # noqa: S101 - a grid has a point
    return values


class SweepStudy:
    """The trials of one sweep. A trial is identified by its number, from 0."""

    def __init__(self, study: optuna.Study, settings: SweepSettings) -> None:
        self._study, self._settings, self._spaces = study, settings, settings.spaces()
        self._distributions = {key: _distribution(space) for key, space in self._spaces.items()}

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers."""
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        return trials

    def trial(self, number: int) -> FrozenTrial:
        return self.trials()[number]

    def add(self, params: Mapping[str, Value], attributes: Mapping[str, Any]) -> int:
        """Record a trial that is about to start, in one line of the journal, and return its number."""
        from optuna.trial import TrialState, create_trial

        number = len(self.trials())
        distributions = {key: self._distributions[key] for key in params}
        with _quiet():
            self._study.add_trial(
                create_trial(
                    state=TrialState.RUNNING,
                    params=dict(params),
                    distributions=distributions,
                    user_attrs=dict(attributes),
                )
            )
        return number

    def propose(self) -> dict[str, Value] | None:
        """Return the values of the next trial; None if the grid has no other point.

        Each proposal depends on the seed, the number of the trial and the results so far, and not on how often the
        controller was restarted.
        """
        if self._settings.sampler == "grid":
            return next(self._unused_grid_points(), None)
        import optuna

        trials = self.trials()
        # A copy of the study draws the values, so that the journal gets a trial with all of them in one line.
        with _quiet():
            copy = optuna.create_study(direction=self._study.direction, sampler=self._sampler(len(trials)))
            copy.add_trials(trials)
            return dict(copy.ask(self._distributions).params)

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        import optuna

        digest = hashlib.sha256(f"{self._settings.seed}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        if self._settings.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        # Counts the running trials as bad ones, so that parallel trials differ.
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _unused_grid_points(self) -> Iterator[dict[str, Value]]:
        used = [trial.params for trial in self.trials()]
        for values in itertools.product(*(space.grid() for space in self._spaces.values())):
            point = dict(zip(self._spaces, values, strict=True))
            if point not in used:
                yield point

    def report(self, number: int, epoch: int, value: float | None) -> None:
        """Record the metric of an epoch, once; None if it is not finite."""
        trial = self.trial(number)
        if epoch not in trial.intermediate_values:
            with _quiet():
                self._handle(trial).report(math.nan if value is None else value, epoch)

    def should_prune(self, number: int, epochs: int) -> bool:
        """Return whether a trial of this many epochs is worse than others were at its latest epoch."""
        if epochs < 1:
            return False
        match self._settings.pruner:
            case "median":
                return self._is_below_median(number, epochs)
            case "asha":
                return self._fails_rung(number, epochs)
        return False

    def _is_below_median(self, number: int, epochs: int) -> bool:
        """Whether the best value of a trial so far is worse than the median of the finished trials at its epoch."""
        from optuna.pruners import MedianPruner

        warmup = -(-epochs // WARMUP_PART)
        pruner = MedianPruner(MIN_FINISHED_TRIALS, n_warmup_steps=warmup, n_min_trials=MIN_FINISHED_TRIALS)
        return pruner.prune(self._study, self.trial(number))

    def _fails_rung(self, number: int, epochs: int) -> bool:
        """Asynchronous successive halving (https://arxiv.org/abs/1810.05934).

        Optuna's pruner compares a trial only with those that were reported to it, and the length of a script is unknown
        until one has ended.
        """
        trials = self.trials()
        own = trials[number].intermediate_values
        for rung in (max(1, epochs // REDUCTION_FACTOR**power) for power in range(RUNGS, 0, -1)):
            step = _first_step(own, rung)
            if step is None or step != trials[number].last_step:
                continue
            others = [(each.intermediate_values, _first_step(each.intermediate_values, rung)) for each in trials]
            merits = sorted((self._merit(values[at]) for values, at in others if at is not None), reverse=True)
            own_merit = self._merit(own[step])
            if own_merit == -math.inf or own_merit < merits[max(len(merits) // REDUCTION_FACTOR, 1) - 1]:
                return True
        return False

    def _merit(self, value: float) -> float:
        return self._settings.objective.merit(value if math.isfinite(value) else None)

    def _handle(self, trial: FrozenTrial) -> optuna.Trial:
        import optuna

        return optuna.Trial(self._study, trial._trial_id)

    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Set an attribute of a running trial."""
        with _quiet():
            self._handle(self.trial(number)).set_user_attr(name, value)

    def complete(self, number: int, value: float, val_loss: float | None = None, divergence: str = "") -> None:
        """Record the result of a trial, the validation loss of its best epoch, and that it diverged."""
        # First: a trial that has ended takes no attribute.
        self.set_attribute(number, VAL_LOSS, val_loss)
        self.set_attribute(number, REASON, divergence)
        with _quiet():
            self._study.tell(number, value)

    def prune(self, number: int, reason: Problem) -> None:
        """Record that a trial was stopped before its end; its latest intermediate value becomes its value."""
        self._end(number, "PRUNED", reason)

    def fail(self, number: int, reason: Problem) -> None:
        """Record that a trial has no result."""
        self._end(number, "FAIL", reason)

    def _end(self, number: int, state: str, reason: Problem) -> None:
        from optuna.trial import TrialState

        self.set_attribute(number, REASON, str(reason))
        self.set_attribute(number, CODE, reason.code)
        with _quiet():
            self._study.tell(number, state=TrialState[state])

    def importances(self) -> dict[str, float]:
        """Return the share of each key in the difference between good and other trials, the largest first.

        PED-ANOVA (https://arxiv.org/abs/2304.10255) of the completed trials; empty if there are too few, or if no
        key has a larger share than the others.
        """
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
        from optuna.trial import TrialState

        complete = [trial for trial in self.trials() if trial.state is TrialState.COMPLETE]
        if len(complete) < MIN_TRIALS_FOR_IMPORTANCE:
            return {}
        with _quiet():
            try:
                shares = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
            # It needs several values of a key and several results.
            except (ValueError, RuntimeError, ZeroDivisionError):
                return {}
        found = {key: round(float(share), 4) for key, share in shares.items() if math.isfinite(share)}
        # The share of a single key, and equal shares, say nothing.
        return found if len(set(found.values())) > 1 else {}


def _first_step(values: Mapping[int, float], rung: int) -> int | None:
    """Return the first step from `rung` on that has a value."""
    return min((step for step in values if step >= rung), default=None)


def _distribution(space: Space) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(space, Range):
        return CategoricalDistribution(cast(Sequence[str], space.values))
    if space.integer:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)

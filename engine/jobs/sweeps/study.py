"""The Optuna study of a sweep, in the journal file of its folder: propose, record and compare trials.

The journal owns the state of a sweep. It is JSON lines; Optuna unpickles nothing from it (only its Redis backend has
pickled snapshots, and only its CMA-ES sampler pickled state). Several jobs of a batch system may write it, one at a
time. The kernel releases their lock when they die, while Optuna's own lock files then stay for 30 s.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.base.errors import UsageError
from engine.base.files import append_to_file, open_regular_file
from engine.base.libraries import import_library
from engine.base.locks import FileLock
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.settings import SweepSettings
from engine.jobs.sweeps.space import Range, Space, Value
from engine.runs.metrics import Better

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

STUDY_NAME = "sweep"
# 100,000 trials of 100 epochs write 1.5 GB; what is larger is no journal of a sweep.
MAX_JOURNAL_BYTES = 1 << 31
# `median`: trials that must have finished, and the part of the epochs that each trial trains at least, one in three.
MIN_FINISHED_TRIALS = 5
WARMUP_PART = 3
# Rungs of `asha`: after 1/9 and 1/3 of the epochs, the best third goes on.
REDUCTION_FACTOR = 3
# Of fewer completed trials, importances would be chance; they are those of being among the best tenth or the best five.
MIN_IMPORTANCE_TRIALS, TOP_SHARE, MIN_TOP_TRIALS = 6, 0.1, 5
# Attributes of a trial in the journal.
PRESET, REASON, CODE, PRUNED_AT, GPUS, VAL_LOSS = "preset", "reason", "code", "pruned_at", "gpus", "val_loss"
TASK = "task"  # the ID of the job that runs the trial, such as 7_3


def require_optuna() -> None:
    """Import Optuna without its log and its warnings about experimental arguments and few trials: they would be
    written over the screen. Raises UsageError."""
    optuna = import_library("optuna", "sweep")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="optuna")


@contextmanager
def journal_errors(path: Path) -> Iterator[None]:
    """Raise UsageError for a journal that cannot be read. Invalid lines raise whatever the replay of their values
    raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError.one(path.parent.name, "has no trial yet", code="no-journal") from error
    except Exception as error:
        reason = f"is not a journal of Optuna: {type(error).__name__}: {error}"
        raise UsageError.one(str(path), reason, code="wrong-format") from error


def open_study(folder: SweepFolder, settings: SweepSettings, *, create: bool = False) -> SweepStudy:
    """Open the study of a sweep. With `create`, the caller is the controller: a missing study is created, and a last
    line that a crash left incomplete is removed. Raises UsageError if there is none or it is not valid."""
    require_optuna()
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path, lock = folder.journal, FileLock(folder.journal_lock)
    with journal_errors(path), lock if create else nullcontext():
        if create:
            os.close(append_to_file(path))
        with open_regular_file(path, MAX_JOURNAL_BYTES) as file:
            if create:
                os.truncate(path, file.read().rfind(b"\n") + 1)
        backend = JournalFileBackend(str(path), lock_obj=cast(Any, lock))
        storage = optuna.storages.JournalStorage(backend)
        if create and not storage.get_all_studies():
            directions = optuna.study.StudyDirection
            direction = directions.MINIMIZE if settings.objective.better is Better.LOW else directions.MAXIMIZE
            optuna.create_study(storage=storage, study_name=STUDY_NAME, direction=direction)
        study = optuna.load_study(storage=storage, study_name=STUDY_NAME)
    return SweepStudy(study, settings, lock)


def first_values(settings: SweepSettings) -> dict[str, Value]:
    """Return what the sampler proposes for the first trial."""
    require_optuna()
    import optuna

    return SweepStudy(optuna.create_study(), settings, nullcontext()).propose() or {}


class SweepStudy:
    """The trials of one sweep. A trial is identified by its number, from 0.

    The holder of `lock` is the only one that writes them."""

    def __init__(self, study: optuna.Study, settings: SweepSettings, lock: AbstractContextManager[None]) -> None:
        self._study, self._settings, self._spaces, self.lock = study, settings, settings.spaces(), lock
        self._distributions = {key: _distribution(space) for key, space in self._spaces.items()}

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers."""
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        return trials

    def trial(self, number: int) -> FrozenTrial:
        return self.trials()[number]

    def unfinished(self, task: str = "") -> list[FrozenTrial]:
        """Return the trials that have not ended; those of one task if it is named."""
        open_trials = [trial for trial in self.trials() if not trial.state.is_finished()]
        return [trial for trial in open_trials if task in ("", trial.user_attrs.get(TASK))]

    def has_task(self, task: str) -> bool:
        """Whether a task has begun a trial, which may have ended."""
        return any(trial.user_attrs.get(TASK) == task for trial in self.trials())

    def best(self) -> FrozenTrial | None:
        """Return the best completed trial, see `Metric.rank`, the first of equals; None if there is none."""
        metric = self._settings.objective
        return max(
            (trial for trial in self.trials() if trial.state.name == "COMPLETE" and trial.value is not None),
            key=lambda trial: metric.rank(trial.value, trial.user_attrs.get(VAL_LOSS), -trial.number),
            default=None,
        )

    def importances(self) -> dict[str, float]:
        """Return how much each searched key decides which trials are the best ones, in shares of 1; empty for a few
        trials.

        PED-ANOVA (arXiv:2304.10255) takes milliseconds for thousands of trials, fANOVA a minute and scikit-learn.
        """
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        complete = sum(trial.state.name == "COMPLETE" for trial in self.trials())
        if complete < MIN_IMPORTANCE_TRIALS:
            return {}
        share = min(max(TOP_SHARE, MIN_TOP_TRIALS / complete), 0.5)
        return get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator(target_quantile=share))

    def propose(self) -> dict[str, Value] | None:
        """Return the values of the next trial; None if the grid has no other point.

        Each proposal depends on the seed, the number of the trial and the results so far, and not on how often the
        controller was restarted.
        """
        import optuna

        trials = self.trials()
        if self._settings.sampler == "grid":
            used = [trial.params for trial in trials]
            values = itertools.product(*(space.grid() for space in self._spaces.values()))
            points = (dict(zip(self._spaces, point, strict=True)) for point in values)
            return next((point for point in points if point not in used), None)
        digest = hashlib.sha256(f"{self._settings.seed}/{len(trials)}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        is_random = self._settings.sampler == "random"
        # TPE counts the running trials as bad ones, so that parallel trials differ.
        samplers = optuna.samplers
        sampler = samplers.RandomSampler(seed) if is_random else samplers.TPESampler(seed=seed, constant_liar=True)
        # A copy of the study draws the values, so that the journal gets a trial with all of them in one line.
        copy = optuna.create_study(direction=self._study.direction, sampler=sampler)
        copy.add_trials(trials)
        return dict(copy.ask(self._distributions).params)

    def add(self, params: Mapping[str, Value], attributes: Mapping[str, Any]) -> int:
        """Record a trial that is about to start, in one line of the journal, and return its number."""
        from optuna.trial import TrialState, create_trial

        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions={key: self._distributions[key] for key in params},
            user_attrs=dict(attributes),
        )
        self._study.add_trial(trial)
        return len(self.trials()) - 1

    def report(self, number: int, step: int, value: float | None) -> None:
        """Record the metric of an epoch or step, once; None if it is not finite."""
        if step not in self.trial(number).intermediate_values:
            self._handle(number).report(math.nan if value is None else value, step)

    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Set an attribute of a running trial."""
        self._handle(number).set_user_attr(name, value)

    def end(self, number: int, state: str, value: float | None = None, /, **attributes: Any) -> None:
        """Record that a trial is COMPLETE with a value, PRUNED with its latest one, or in state FAIL without one."""
        from optuna.trial import TrialState

        # First: a trial that has ended takes no attribute.
        for name, each in attributes.items():
            self.set_attribute(number, name, each)
        self._study.tell(number, value, TrialState[state])

    def _handle(self, number: int) -> optuna.Trial:
        import optuna

        return optuna.Trial(self._study, self.trial(number)._trial_id)

    def should_prune(self, number: int, steps: int) -> bool:
        """Return whether a trial of this many steps is worse than others were at its latest step."""
        from optuna.pruners import MedianPruner, SuccessiveHalvingPruner

        if steps < 1 or self._settings.pruner == "none":
            return False
        if self._settings.pruner == "asha":
            first_rung = -(-steps // REDUCTION_FACTOR**2)
            halving = SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=REDUCTION_FACTOR)
            return halving.prune(self._study, self.trial(number))
        warmup = -(-steps // WARMUP_PART)
        pruner = MedianPruner(MIN_FINISHED_TRIALS, n_warmup_steps=warmup, n_min_trials=MIN_FINISHED_TRIALS)
        return pruner.prune(self._study, self.trial(number))


def _distribution(space: Space) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(space, Range):
        return CategoricalDistribution(cast(Sequence[str], space.values))
    if space.integer:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)

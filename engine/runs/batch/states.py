"""The batch systems that gputrain knows, and what they say of jobs: one question for all jobs, cached for seconds.

`engine.runs.batch.job` calls it for each run of a list. A batch system that does not answer holds up the first question
only.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from engine.base.threads import in_background
from engine.runs.batch.engine import BatchError, Engine, JobState
from engine.runs.batch.ray import Ray
from engine.runs.batch.slurm import Slurm

ENGINES: Mapping[str, Callable[[str], Engine]] = {"slurm": Slurm, "ray": Ray}
"""The batch systems by the word behind `--on`. They take what follows its colon, and raise BatchError for that."""
SUBMITTING_TOOLS = {"slurm": "sbatch"}
MAX_AGE_SECONDS = 5.0  # of an answer, which slurmctld gives to hundreds of users
FIRST_WAIT_SECONDS = 5.0
# A job that was submitted so lately may be missing in an answer.
SETTLE_SECONDS = 30.0


class UnknownJobError(BatchError):
    """A batch system that answers does not know a job, any more."""


@dataclass
class _Answer:
    """What a batch system said at `time`, in Unix seconds. `since` is what it was asked for beside live jobs."""

    time: float
    since: float | None
    states: Mapping[str, JobState] = field(default_factory=dict)
    problem: str = ""


_answers: dict[str, _Answer] = {}
_questions: dict[str, Future[_Answer]] = {}
"""The latest question to each batch system, which may be under way."""
_lock = threading.Lock()


def is_batch_system(place: str) -> bool:
    """Return whether a place of `--on` is a batch system and no host."""
    return place.partition(":")[0] in ENGINES


def find_engine(place: str) -> Engine:
    """Return the batch system of `slurm` or `ray:ADDRESS`. Raises BatchError."""
    word, _, address = place.partition(":")
    if word not in ENGINES:
        raise BatchError(f"{place} is no batch system that this version of gputrain knows")
    return ENGINES[word](address)


def found_engines() -> list[str]:
    """Return the batch systems without an address whose command this host has."""
    return [word for word, tool in SUBMITTING_TOOLS.items() if shutil.which(tool)]


def job_state(engine: str, job: str, submitted_at: float) -> JobState:
    """Return the state of a job, a few seconds old at most. Raises BatchError, and UnknownJobError."""
    answer = _answer(engine, None)
    if answer is not None and not answer.problem and job not in answer.states:
        answer = _answer(engine, submitted_at)
    if answer is None:
        raise BatchError(f"{engine} has not answered yet")
    if (state := answer.states.get(job)) is not None:
        return state
    is_settled = answer.since is not None and answer.time > submitted_at + SETTLE_SECONDS
    raise (
        UnknownJobError(f"job {job} is unknown to {engine}")
        if is_settled and not answer.problem
        else BatchError(answer.problem or f"{engine} does not list job {job} yet")
    )


def forget(engine: str) -> None:
    """Ask again at the next question: a job was submitted or cancelled."""
    with _lock:
        _answers.pop(engine, None)
        _questions.pop(engine, None)


def _answer(engine: str, since: float | None) -> _Answer | None:
    """Return an answer that covers jobs since a time; None if there is none yet."""
    with _lock:
        question = _questions.get(engine)
        if question is not None and question.done():
            _answers[engine] = question.result()
        answer = _answers.get(engine)
        covers = answer is not None and _reaches(answer.since, since)
        is_old = answer is None or time.time() - answer.time > MAX_AGE_SECONDS
        if question is None or (question.done() and (is_old or not covers)):
            question = _questions[engine] = in_background(partial(_ask, engine, since))
    if not covers:
        with suppress(TimeoutError):
            return question.result(FIRST_WAIT_SECONDS)
    return answer


def _reaches(known: float | None, wanted: float | None) -> bool:
    return wanted is None or (known is not None and known <= wanted)


def _ask(engine: str, since: float | None) -> _Answer:
    answer = _Answer(time.time(), since)
    try:
        answer.states = find_engine(engine).states(since)
    except BatchError as error:
        answer.problem = error.problems[0].reason
    return answer

"""The wait for a run follows it through its states until it has ended, is gone, or meets a condition."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.report.awaited_run import CRASH_GRACE_SECONDS, RESTART_GRACE_SECONDS, Result, RunWait, parse_condition
from engine.runs.events import RankFailed, RunFinished, RunPaused, WaitingForGpus
from engine.runs.folder import RunFolder, RunState
from engine.runs.manage import move_to_trash
from engine.runs.ownership import Ownership
from engine.runs.query import Query
from engine.runs.run_row import RunRow
from support.messages import raises_problem
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, make_record, make_run_folder, with_fields


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a", make_run_started()).identified()


def awaited(run: RunFolder, clock: Clock) -> RunWait:
    return RunWait(run, clock)


def polled(wait: RunWait, condition: Query | None = None) -> Result | None:
    wait.poll(condition)
    return wait.result


def condition(wait: RunWait, text: str) -> Query:
    return parse_condition(text, [wait.row], {})[0]


def test_wait_goes_on_through_pause_and_restart_of_the_ranks(run: RunFolder, clock: Clock) -> None:
    ownership, wait = Ownership(RunFolder(run.path)), awaited(run, clock)
    failure = RankFailed(rank=0, device="cpu", cause="killed", code="process-killed")
    for event in (RunPaused(step=1, epoch=1), failure, make_run_resumed(0, 2.0), WaitingForGpus(message="busy")):
        append_events(run, event)
        assert polled(wait) is None
    append_events(run, RunFinished(state="finished"))
    ownership.release()
    assert polled(wait) is Result.FINISHED


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_wait_ends_with_the_run(run: RunFolder, clock: Clock, state: str) -> None:
    append_events(run, RunFinished(state=state, message="as it is"))
    wait = awaited(run, clock)
    assert polled(wait) == state
    described = wait.describe(None, {})
    assert (described.result, described.state, described.message) == (state, state, "as it is")
    assert (described.failure is not None) == (state == "failed")


def test_run_without_owner_has_crashed_after_a_grace_unless_it_is_resumed(run: RunFolder, clock: Clock) -> None:
    wait = awaited(run, clock)
    assert polled(wait) is None
    ownership = Ownership(RunFolder(run.path))
    clock.now += CRASH_GRACE_SECONDS
    assert polled(wait) is None
    ownership.release()
    assert polled(wait) is None
    clock.now += CRASH_GRACE_SECONDS
    assert polled(wait) is Result.CRASHED
    assert wait.describe(None, {}).failure is not None


def test_torchrun_has_longer_to_restart_its_ranks(run: RunFolder, clock: Clock) -> None:
    ownership = Ownership(RunFolder(run.path), agents=["host 1"])
    ownership.release()
    wait = awaited(run, clock)
    assert polled(wait) is None
    clock.now += CRASH_GRACE_SECONDS
    assert polled(wait) is None
    clock.now += RESTART_GRACE_SECONDS
    assert polled(wait) is Result.CRASHED


def test_wait_in_the_queue_that_was_killed_is_interrupted(run: RunFolder, clock: Clock) -> None:
    append_events(run, WaitingForGpus(message="busy"))
    wait = awaited(run, clock)
    assert polled(wait) is None
    clock.now += CRASH_GRACE_SECONDS
    assert polled(wait) is Result.INTERRUPTED
    assert wait.describe(None, {}).remedy.startswith("gputrain queue resume a")


def delete(run: RunFolder) -> None:
    shutil.rmtree(run.path)


@pytest.mark.parametrize("remove", [delete, move_to_trash])
def test_deleted_run_ends_the_wait(run: RunFolder, clock: Clock, remove: Callable[[RunFolder], object]) -> None:
    append_events(run, RunFinished(state="stopped"))
    wait = awaited(run, clock)
    remove(RunFolder(run.path))
    assert polled(wait) is Result.DELETED
    assert wait.describe(None, {}).message == "the run was deleted"


def test_condition_is_met_by_a_metric_that_appears_later(run: RunFolder, clock: Clock) -> None:
    ownership, wait = Ownership(RunFolder(run.path)), awaited(run, clock)
    query, notes = parse_condition('"val f1">0.5 epochs>=2', [wait.row], {})
    assert (len(notes), polled(wait, query)) == (1, None)
    append_events(run, replace(make_epoch(1), metrics={"val f1": 0.7}))
    assert polled(wait, query) is None
    append_events(run, replace(make_epoch(2), metrics={"val f1": 0.6}))
    assert polled(wait, query) is Result.MET
    ownership.release()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reward>1", "finished without reward>1: reward is unknown"),
        ("f1>0.9", "finished without f1>0.9: f1 is 0.5"),
        ("val_accuracy>90%", "finished without val_accuracy>90%: val_accuracy is 0.5"),
    ],
)
def test_run_that_finished_without_meeting_the_condition_says_why(
    run: RunFolder, clock: Clock, text: str, reason: str
) -> None:
    epochs = [replace(make_epoch(n), metrics={"f1": f1}, val_accuracy=0.5) for n, f1 in ((1, 0.95), (2, 0.5))]
    append_events(run, *epochs, RunFinished(state="finished"))
    wait = awaited(run, clock)
    query = condition(wait, text)
    assert polled(wait, query) is Result.UNMET
    assert wait.describe(query, {}).message == reason


def test_run_that_failed_has_no_unmet_condition(run: RunFolder, clock: Clock) -> None:
    append_events(run, RunFinished(state="failed"))
    wait = awaited(run, clock)
    assert polled(wait, condition(wait, "reward>1")) is Result.FAILED


def test_state_is_a_condition_too(run: RunFolder, clock: Clock) -> None:
    ownership, wait = Ownership(RunFolder(run.path)), awaited(run, clock)
    assert polled(wait, condition(wait, "paused")) is None
    append_events(run, RunPaused(step=1, epoch=1))
    assert polled(wait, condition(wait, "paused")) is Result.MET
    ownership.release()


def test_condition_without_a_value_is_refused() -> None:
    with raises_problem("missing-value"):
        parse_condition("reward>", [], {})


@pytest.mark.parametrize("text", ["loss<0.5", "best_loss<0.2", "accuracy>0.8", "best_accuracy>0.9"])
def test_condition_is_on_the_metric_that_a_command_prints_later_under_a_short_name(text: str) -> None:
    waiting = RunRow("a", "/runs/a", RunState.RUNNING, make_record(command="python train.py"))
    query, notes = parse_condition(text, [waiting], {})
    assert (notes, query.matches(waiting)) == ([], False)
    best = {"lowest_metrics": {"loss": 0.1}, "highest_metrics": {"accuracy": 0.95}}
    assert query.matches(with_fields(waiting, metrics={"loss": 0.4, "accuracy": 0.85}, **best))

"""The owner of a run that waits: its place in the queue, its dependencies, and a wait that is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_stored
from engine.gpus.allocation import GpuAllocation
from engine.gpus.reservation import Reservation
from engine.launch import phases
from engine.launch.phases import AlreadyFinishedError, EndedBeforeStartError, grant_allocated
from engine.launch.preflight import Preflight, run_preflight
from engine.launch.ranks import end_training
from engine.launch.request import RunRequest
from engine.launch.training import begin_training
from engine.queue.dependencies import DependencyError
from engine.queue.place import CancelledError
from engine.queue.state import QueueStage, is_interrupted, read_queue_state
from engine.runs.control import send_request
from engine.runs.event_lines import event_line
from engine.runs.events import RunFinished, WaitingForGpus
from engine.runs.folder import list_runs
from engine.runs.run_record import read_run_record
from engine.utils.codec import or_none
from engine.utils.errors import UsageError
from engine.utils.exit_codes import ExitCode
from support.messages import says
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.runs.run_owner import FAILED, PREFLIGHT, Owner, make_ended_run, owner


def test_owner_does_not_queue_run_that_has_nothing_left_to_do(tmp_path: Path) -> None:
    make_ended_run(tmp_path, "finished")
    with owner(tmp_path, run={"resume": True, "epochs": 2}) as owned, pytest.raises(AlreadyFinishedError):
        owned.queue()


def test_owner_finds_end_that_only_the_journal_of_a_killed_run_has(tmp_path: Path) -> None:
    folder = make_ended_run(tmp_path, "finished")
    folder.summary.write_text('{"format": 1, "state": "running"}')
    with owner(tmp_path, run={"resume": True, "epochs": 2}) as owned, pytest.raises(AlreadyFinishedError):
        owned.queue()


def test_waiting_run_records_its_place_among_those_that_wait_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservations = tmp_path / "reservations"
    reservations.mkdir()
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(reservations))
    for module in ("engine.queue.place", "engine.runs.recorder"):
        monkeypatch.setattr(f"{module}.RECORD_INTERVAL_SECONDS", 0.0)
    first, second = Reservation(), Reservation()
    first.enqueue("free:1", ["GPU-1"], "first")
    with owner(tmp_path / "runs") as owned:
        waiting = owned.queue().place

        def report(**terms: object) -> int | None:
            second.set_terms(replace(waiting.poll_terms()[0], **terms), None)
            second.enqueue("free:1", ["GPU-1"], "second")
            waiting.report("no GPU is free")
            record = read_run_record(owned.folder)
            assert record is not None and record.state == "waiting"
            return record.values.get("queue_place")

        assert report() == 2
        first.release()
        assert report() == report() == 1
        assert report(blocked="held") is None
        events = [event for event in owned.recorded() if isinstance(event, WaitingForGpus)]
        assert [or_none(event.place) for event in events] == [2, 1, None]
        assert event_line(events[0]) == "waiting: no GPU is free (place 2 in the queue)"
        waiting.leave([])
        record = read_run_record(owned.folder)
        assert record is not None and (record.state, record.values.get("queue_place")) == ("starting", None)
    second.release()


def test_owner_takes_run_out_of_queue_that_fails_before_it_starts(tmp_path: Path) -> None:
    owned = Owner(RunRequest(Config(), tmp_path, "a"))
    with owned.held:
        granted = grant_allocated(owned.requested, GpuAllocation(), owned.queue())
        end_training(begin_training(granted, PREFLIGHT), FAILED)
    [folder] = list_runs(tmp_path)
    state = read_queue_state(folder)
    assert state is not None
    assert state.stage is QueueStage.ENDED
    assert not is_interrupted(folder)


def test_run_that_waits_again_still_reduces_default_batch_size(tmp_path: Path) -> None:
    with owner(tmp_path, data={"dataset": "fake", "fake_train": 20}) as owned:
        owned.queue()
    config = resolve_config(str(owned.folder.config), ["run.resume=true", "device.gpus=cpu"]).config
    preflight = run_preflight(RunRequest(config, tmp_path, "a"), lambda wait: ())
    assert preflight.problems == []
    assert preflight.chosen(config).data.batch_size == 20


def test_started_run_stores_default_batch_size() -> None:
    assert as_stored(Preflight().chosen(Config()))["data"]["batch_size"] == Config().data.batch_size


def test_owner_keeps_dependencies_of_run_whose_wait_was_interrupted(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "b", make_run_started(), RunFinished(state="finished"))
    with owner(tmp_path, queue={"after": ["b"]}) as owned:
        owned.queue()
    with owner(tmp_path, run={"resume": True}) as owned:
        place = owned.queue().place
        assert [dependency.name for dependency in place.state.after] == ["b"]


def test_run_behind_stopped_run_is_held_until_it_is_released(tmp_path: Path) -> None:
    for name, state in (("b", "stopped"), ("c", "finished")):
        make_run_folder(tmp_path, name, make_run_started(), RunFinished(state=state))
    with owner(tmp_path, queue={"after": ["b", "c"]}) as owned:
        place = owned.queue().place
        terms, reason = place.poll_terms()
        assert terms.blocked == "held"
        assert "`gputrain resume b`" in reason and "`gputrain queue release a`" in reason
        send_request(owned.folder.control, "release")
        assert place.poll_terms() == (replace(terms, blocked=""), "")
        assert [dependency.name for dependency in place.state.after] == ["c"]


def test_interrupted_wait_of_run_can_be_resumed(tmp_path: Path) -> None:
    make_ended_run(tmp_path, "stopped")
    with pytest.raises(EndedBeforeStartError) as ended, owner(tmp_path, run={"resume": True}) as owned:
        owned.queue().place.report("no GPU is free")
        raise KeyboardInterrupt
    assert ended.value.exit_code == ExitCode.FAILED
    [warning] = owned.warnings
    assert says(warning, "interrupted", "`gputrain queue resume a`")
    assert is_interrupted(owned.folder)


@pytest.mark.parametrize(
    ("resumes", "has_waited", "starts", "is_kept"),
    [
        (False, True, False, False),
        (True, False, False, False),
        (True, True, False, True),
        (True, True, True, False),
    ],
)
def test_run_that_is_refused_before_it_starts_records_why_if_its_folder_holds_more_than_a_wait(
    tmp_path: Path, resumes: bool, has_waited: bool, starts: bool, is_kept: bool
) -> None:
    if resumes:
        make_ended_run(tmp_path, "stopped")
    raised = pytest.raises(EndedBeforeStartError if is_kept else UsageError)
    with raised, owner(tmp_path, run={"resume": resumes}) as owned:
        queued = owned.queue()
        if has_waited:
            queued.place.report("no GPU is free")
        if starts:
            granted = grant_allocated(owned.requested, GpuAllocation(), queued)
            begin_training(granted, PREFLIGHT).emit(make_run_started())
        raise UsageError.one("", "refused", code="conflict")
    state = read_queue_state(owned.folder)
    assert (state is not None) == owned.folder.path.exists() == resumes
    if state is not None:
        assert state.stage is (QueueStage.STARTED if starts else QueueStage.ENDED)
        assert any(isinstance(each, RunFinished) and each.message == "refused" for each in owned.recorded()) == is_kept


@pytest.mark.parametrize(
    ("error", "state", "occasions"),
    [
        (DependencyError("b failed", code="dependency-failed"), "failed", ["failed"]),
        (CancelledError("b failed"), "stopped", []),
    ],
)
def test_run_that_ends_in_the_queue_is_reported_unless_its_user_cancelled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str, occasions: list[str]
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(phases, "send_logged", lambda folder, message, urls: sent.append(message.occasion))
    make_ended_run(tmp_path, "stopped")
    notify = {"urls": ["env:NOWHERE"], "when": ["failed", "stopped"], "min_minutes": 0}
    with pytest.raises(EndedBeforeStartError), owner(tmp_path, run={"resume": True}, notify=notify) as owned:
        owned.queue().place.report("waits for b")
        raise error
    assert sent == occasions
    finished = owned.recorded()[-1]
    assert isinstance(finished, RunFinished)
    assert (finished.state, finished.message) == (state, "b failed")
    assert not is_interrupted(owned.folder)

"""The owner of a run: what it claims, announces, records and leaves behind, in each way in which a run can end."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest

from engine.base.codec import or_none
from engine.base.errors import Problem, UsageError
from engine.base.exit_codes import ExitCode
from engine.config.loader import resolve_config
from engine.config.schema import Config, as_stored
from engine.gpus import reservation
from engine.gpus.allocation import GpuAllocation
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation import Reservation
from engine.gpus.reservation_entry import ReservedRank
from engine.gpus.reservation_reader import read_reservations
from engine.jobs.launch import phases
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.phases import AlreadyFinishedError, EndedBeforeStartError, grant_allocated
from engine.jobs.launch.preflight import Preflight, run_preflight
from engine.jobs.launch.ranks import Ranks, end_training, restart_after
from engine.jobs.launch.request import RunRequest
from engine.jobs.launch.supervise import Supervisor, slurm_job_id
from engine.jobs.launch.training import begin_training, make_job
from engine.jobs.queue.dependencies import DependencyError
from engine.jobs.queue.place import CancelledError
from engine.jobs.queue.state import QueueStage, is_interrupted, read_queue_state
from engine.runs import ownership
from engine.runs.control import send_request
from engine.runs.event_lines import event_line
from engine.runs.events import RunFinished, WaitingForGpus, WarningEvent
from engine.runs.folder import list_runs
from engine.runs.history import history_from_events
from engine.runs.journal import to_line
from engine.runs.records import RankDevice
from engine.runs.run_record import read_run_record
from engine.train.loop.job import RunResult
from support.messages import has_problem, says
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.runs.run_owner import FAILED, PREFLIGHT, Owner, make_ended_run, owner


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_owner_records_early_warnings_and_shows_them_once(tmp_path: Path) -> None:
    fallback, shared = Problem("", "on the CPU", code="gpu-fallback"), Problem("", "shared", code="gpu-in-use")
    empty = Problem("data.path", "empty", code="no-images")
    with owner(tmp_path) as owned:
        allocated = GpuAllocation(warnings=[fallback, shared], cpu_fallback=fallback)
        owned.begin(replace(PREFLIGHT, warnings=[empty]), allocated)
        for events in (owned.shown, owned.recorded()):
            warnings = [replace(each, time=0.0) for each in events if isinstance(each, WarningEvent)]
            assert warnings == [
                WarningEvent(time=0.0, message=str(problem), code=problem.code, cpu_fallback=problem is fallback)
                for problem in (fallback, shared, empty)
            ]


@pytest.mark.parametrize(
    ("state", "epochs", "is_left"),
    [("finished", 1, False), ("finished", 2, False), ("finished", 3, True), ("stopped", 2, True), ("failed", 2, True)],
)
def test_owner_resumes_run_that_has_something_left_to_do(
    tmp_path: Path, state: str, epochs: int, is_left: bool
) -> None:
    make_ended_run(tmp_path, state)
    with owner(tmp_path, run={"resume": True, "epochs": epochs}) as owned:
        job = None
        with nullcontext() if is_left else pytest.raises(AlreadyFinishedError):
            job = owned.prepare()
        assert (job is not None and job.resumed) == is_left
        assert len(owned.warnings) == (not is_left)
        assert is_left or says(owned.warnings[0], "already-finished", "a ", "2 epochs", "run.epochs")


def test_owner_that_is_refused_its_claim_leaves_the_folder_to_others(tmp_path: Path) -> None:
    folder = make_ended_run(tmp_path, "finished")
    with pytest.raises(AlreadyFinishedError), owner(tmp_path, run={"resume": True, "epochs": 1}) as owned:
        owned.prepare()
    assert not folder.is_owned()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "has format 2, but this gputrain reads format 1"),
        ({"ranks": None}, "is damaged: $.ranks"),
    ],
    ids=["later format", "damaged"],
)
def test_owner_and_preflight_refuse_to_resume_run_of_another_format(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    folder = make_ended_run(tmp_path, "stopped")
    started = json.loads(to_line(make_run_started())) | change
    # A later version of gputrain has resumed the run.
    with folder.journal.open("a") as file:
        file.write(json.dumps(started) + "\n" + to_line(RunFinished(state="stopped")) + "\n")
    recorded = folder.journal.read_bytes()
    with owner(tmp_path, run={"resume": True}) as owned:
        [problem] = run_preflight(owned.requested.request, lambda wait: []).problems
        with pytest.raises(UsageError) as raised:
            owned.prepare()
    assert raised.value.problems == [problem]
    assert has_problem([problem], "wrong-version", str(folder.journal), reason, "--name")
    assert folder.journal.read_bytes() == recorded


@pytest.mark.parametrize(
    ("result", "has_checkpoint", "code", "values"),
    [
        (FAILED, False, ExitCode.FAILED, ["rank 0 (cpu) ", "killed"]),
        (RunResult("finished"), True, ExitCode.FINISHED, []),
        (RunResult("stopped"), True, ExitCode.STOPPED, ["`gputrain resume a`"]),
        (RunResult("stopped"), False, ExitCode.FAILED, []),
        (RunResult("killed", reason="no news"), True, ExitCode.STOPPED, ["no news", "`gputrain resume a`"]),
    ],
)
def test_owner_records_how_the_run_ended(
    tmp_path: Path, result: RunResult, has_checkpoint: bool, code: ExitCode, values: list[str]
) -> None:
    with owner(tmp_path) as owned:
        run = owned.begin()
        if has_checkpoint:
            (owned.folder.checkpoints / "last.pt").touch()
        assert end_training(run, result) == code
        *before, finished = owned.recorded()
    assert isinstance(finished, RunFinished)
    assert finished.state == result.state.replace("killed", "stopped")
    assert all(value in finished.message for value in values)
    assert ("`gputrain resume" in finished.message) is ("`gputrain resume a`" in values)
    assert bool(finished.message) is (result.state != "finished")
    assert before == ([result.failure] if result.failure is not None else [])


@pytest.mark.parametrize(("result", "code"), [(RunResult("finished"), ExitCode.FINISHED), (FAILED, ExitCode.FAILED)])
def test_dry_run_leaves_no_folder_and_shows_its_failure(tmp_path: Path, result: RunResult, code: ExitCode) -> None:
    with owner(tmp_path, dry_run=True) as owned:
        assert end_training(owned.begin(), result) == code
        messages = [event.message for event in owned.shown if isinstance(event, RunFinished)]
        assert messages == ["rank 0 (cpu) failed: killed"] * (result is FAILED)
    assert list(tmp_path.iterdir()) == []


def test_detached_owner_writes_to_the_log_and_no_longer_to_its_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Path | None] = []
    monkeypatch.setattr(phases, "redirect_output", logs.append)
    with owner(tmp_path, detached=True) as owned:
        run = owned.record()
        run.emit(WarningEvent(message="slow", code="no-effect"))
        assert [log.read_text() for log in logs if log is not None] == [owned.folder.log.read_text()]
        assert owned.shown == []
        state = read_queue_state(owned.folder)
        assert state is not None
        assert state.stage is QueueStage.GRANTED


def test_owner_stores_the_batch_size_that_the_ranks_found(tmp_path: Path) -> None:
    with owner(tmp_path, data={"batch_size": "auto"}) as owned:
        run = owned.record()
        assert run.settled.used.data.batch_size == "auto"
        run.emit(replace(make_run_started(), batch_size=48))
        assert resolve_config(str(run.folder.config)).config.data.batch_size == 48


@pytest.mark.parametrize(
    ("state", "is_near", "calls"),
    [("stopped", True, "requeue 77\n"), ("finished", True, ""), ("stopped", False, "")],
)
def test_owner_requeues_slurm_job_only_of_run_that_its_time_limit_stops(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Literal["stopped", "finished"],
    is_near: bool,
    calls: str,
) -> None:
    log, scontrol = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    log.touch()
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with owner(tmp_path / "runs", run={"requeue": True}) as owned:
        run = owned.record()
        child = Ranks(run, make_job(run, PREFLIGHT), iter([]))
        supervisor = Supervisor(run, child, GpuUsagePoller([]))
        supervisor.signals.time_limit_near = is_near
        child.finish(RunResult(state), supervisor.signals, supervisor.requeue)
        assert log.read_text() == calls
        finished = owned.recorded()[-1]
        assert isinstance(finished, RunFinished)
        assert finished.message.endswith("; job 77 is requeued") == bool(calls)


def test_job_of_an_array_is_requeued_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Slurm gives the last job of an array the number of the array.
    for name, value in (("SLURM_JOB_ID", "77"), ("SLURM_ARRAY_JOB_ID", "77"), ("SLURM_ARRAY_TASK_ID", "3")):
        monkeypatch.setenv(name, value)
    assert slurm_job_id() == "77_3"


@pytest.mark.parametrize(
    ("result", "stopping", "restarts"),
    [
        (FAILED, False, True),
        (FAILED, True, False),
        (RunResult("failed", replace(FAILED.failure, repeats=True)), False, False),  # type: ignore[type-var]
        (RunResult("finished"), False, False),
    ],
)
def test_ranks_restart_after_failure_that_may_not_recur(result: RunResult, stopping: bool, restarts: bool) -> None:
    history = history_from_events([make_run_started()])
    history.stopping = stopping
    assert (restart_after(result, history) is not None) == restarts


def test_owner_publishes_gpu_ranks_of_started_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    with owner(tmp_path / "runs") as owned:
        allocated = GpuAllocation()
        allocated.reservation.reserve(["GPU-1"], "all", ["GPU-1"], "a")
        run = owned.record(allocation=allocated)
        ranks = [RankDevice(0, socket.gethostname(), os.getpid(), "GPU-1")]
        run.emit(replace(make_run_started(), ranks=ranks))
        [published] = read_reservations()
        assert published.ranks == (ReservedRank("a", 0, os.getpid(), "GPU-1"),)
    assert read_reservations() == []


def test_owner_renews_heartbeat_and_keeps_reservation_from_tmp_cleaners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    monkeypatch.setattr(ownership, "HEARTBEAT_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(reservation, "BEAT_SECONDS", -1.0)
    allocated, owned = GpuAllocation(), Owner(RunRequest(Config(), tmp_path / "runs", "a"))
    allocated.reservation.set_terms(QueueTerms(folder="/runs/a"))
    allocated.reservation.enqueue("free:1", ["GPU-0"], "a")
    with owned.held:
        run = owned.record(allocation=allocated)
        [folder] = list_runs(tmp_path / "runs")
        folder.owner.write_text(json.dumps(json.loads(folder.owner.read_text()) | {"heartbeat": 0}))
        reserved = [*tmp_path.glob("gputrain-*/*")]
        for path in reserved:
            os.utime(path, (0, 0))
        run.keep_alive()
        assert json.loads(folder.owner.read_text())["heartbeat"] > 0
        assert sorted(path.suffix for path in reserved) == [".folder", ".json", ".lock"]
        assert all(max(path.stat().st_mtime, path.stat().st_atime) > 0 for path in reserved)


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
    for module in ("engine.jobs.queue.place", "engine.runs.recorder"):
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

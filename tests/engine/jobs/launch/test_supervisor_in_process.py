"""The supervisor in this process, with forked ranks that run a function: requests, failures, stalls and kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from engine.base.errors import UsageError
from engine.base.exits import describe_exit
from engine.jobs.launch import ranks
from engine.jobs.launch.ranks import ProgressReporter
from engine.runs.control import send_request
from engine.runs.event_lines import TrainingProgress
from engine.runs.events import ControlEvent, Event, WarningEvent
from engine.runs.folder import RunFolder
from engine.train.distributed.channel import PipeChannel
from engine.train.distributed.watchdog import Heartbeats, Phase
from engine.train.loop.job import Outcome, RunResult
from support.gputrain_command import wait_for
from support.runs.supervised import Supervised, abort, cause_of, fail, finish, hang, wait_for_stop


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "a"
    path.mkdir()
    return RunFolder(path).identified()


def test_supervisor_leaves_ranks_without_progress_alone_until_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "STOP_TIMEOUT_SECONDS", 0.05)

    def idle(channel: PipeChannel) -> Outcome:
        channel.enter_phase(1, Phase.FORWARD)
        time.sleep(0.4)
        channel.send(WarningEvent(message="idled", code="no-effect"))
        return "finished"

    run = Supervised(idle, idle)
    assert (run.run(), run.messages) == (RunResult("finished"), ["idled"] * 2)


def test_supervisor_names_the_hung_rank_and_why_its_process_is_blocked(folder: RunFolder) -> None:
    def freeze(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.DATA)
        os.kill(os.getpid(), signal.SIGSTOP)
        return "finished"

    def wait(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.DATA)
        return hang(channel)

    result = Supervised(wait, freeze, folder=folder, watchdog=0.3).run()
    assert cause_of(result) == (
        "1: no progress for 0.3 s (run.watchdog); the other ranks wait for rank 1; this rank completed 3 steps and is "
        "waiting for data; its process is stopped (SIGSTOP)"
    )


def test_supervisor_forwards_requests_and_records_their_outcome(folder: RunFolder) -> None:
    folder.control.mkdir()
    send_request(folder.control, "pause")
    send_request(folder.control, "stop")
    (folder.control / "2.json").write_text('{"format": 1, "request": "dance", "by": "a"}')

    def report_pause(channel: PipeChannel) -> Outcome:
        wait_for_stop(channel)
        channel.send(WarningEvent(message=f"paused {channel.poll_requests().paused}", code="no-effect"))
        return "stopped"

    run = Supervised(report_pause, report_pause, folder=folder)
    assert run.run() == RunResult("stopped")
    assert run.messages == ["paused True", "paused True"]
    controls = [(event.request, event.outcome) for event in run.events if isinstance(event, ControlEvent)]
    assert controls == [
        ("pause", "at the next step"),
        ("stop", "at the next step, with a checkpoint"),
        ("dance", "unknown request, ignored"),
    ]


def test_supervisor_kills_ranks_that_do_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STOP_TIMEOUT_SECONDS", 0.2)
    run = Supervised(hang, hang)
    run.signals.request_stop("SIGTERM")
    reason = "no rank made progress for 0.2 s after the stop request, so no checkpoint was saved"
    assert run.run() == RunResult("killed", reason=reason)


def test_supervisor_waits_for_slow_checkpoint_after_stop_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STOP_TIMEOUT_SECONDS", 0.05)

    def save(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.CHECKPOINT)
        channel.send(WarningEvent(message="saves", code="no-effect"))
        wait_for_stop(channel)
        time.sleep(0.4)
        return "stopped"

    run = Supervised(save, save)

    def stop_once_both_save() -> None:
        if len(run.messages) == 2:
            run.signals.request_stop("SIGTERM")

    assert run.run(stop_once_both_save) == RunResult("stopped")


@pytest.mark.parametrize(("counts", "oom_killed"), [((5, 5), False), ((5, 6), True), ((None,), None)])
def test_supervisor_blames_oom_killer_only_if_it_has_killed_since_the_start(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int | None, ...], oom_killed: bool | None
) -> None:
    def kill_itself(channel: PipeChannel) -> Outcome:
        os.kill(os.getpid(), signal.SIGKILL)
        return "finished"

    remaining = list(counts)
    monkeypatch.setattr(ranks, "oom_kill_count", lambda: remaining.pop(0))
    cause = describe_exit(-signal.SIGKILL, oom_killed=oom_killed)
    result = Supervised(finish, kill_itself).run()
    assert cause_of(result) == f"1: {cause}"
    assert result.failure is not None and result.failure.code == cause.code


def test_supervisor_reads_cause_of_abort_in_log_of_this_start_only(folder: RunFolder) -> None:
    def abort_with_message(channel: PipeChannel) -> Outcome:
        os.write(2, b"[rank1]: terminated with exception: bad driver\n")
        abort(channel)
        raise AssertionError

    assert cause_of(Supervised(finish, abort_with_message, folder=folder).run()).endswith("SIGABRT: bad driver")
    result = Supervised(finish, abort, folder=folder).run()
    cause = cause_of(result)
    assert cause.startswith("1: ") and "SIGABRT" in cause and "bad driver" not in cause


def test_supervisor_reports_ranks_that_cannot_be_started() -> None:
    assert cause_of(Supervised().run()) == "0: OSError: the ranks cannot be forked"


def test_supervisor_raises_problem_of_config_that_ranks_find_once() -> None:
    def refuse(channel: PipeChannel) -> Outcome:
        raise UsageError.one("model.name", "unknown", code="unknown-value")

    with pytest.raises(UsageError) as caught:
        Supervised(refuse, refuse).run()
    assert [problem.location for problem in caught.value.problems] == ["model.name"]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. An orphan stays a zombie where no init process reaps it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_rank_starter_ends_ranks_and_is_reported() -> None:
    run = Supervised(hang, hang)
    ranks: list[psutil.Process] = []

    def kill_starter() -> None:
        if run.ranks.pids and not ranks:
            ranks.extend(map(psutil.Process, run.ranks.pids))
            run.ranks._process.kill()

    cause = cause_of(run.run(kill_starter))
    assert cause.startswith("0: ") and "SIGKILL" in cause
    assert run.ranks.died_early
    wait_for(lambda: all(map(has_ended, ranks)), "the end of the ranks", 9)


def test_supervisor_names_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.05)

    def fail_on_stop(channel: PipeChannel) -> Outcome:
        wait_for_stop(channel)
        return fail(channel)

    run = Supervised(hang, fail_on_stop)

    def end_one_rank_once_both_run() -> None:
        if run.ranks.pids:
            run.signals.request_stop("SIGTERM")
        while run.requests.stop and run.ranks.exit_code(1) is None:
            run.ranks.poll()

    kill = run.ranks.kill
    # A process in uninterruptible sleep outlives SIGKILL.
    monkeypatch.setattr(run.ranks, "kill", lambda: None)
    result = run.run(end_one_rank_once_both_run)
    reason = f"process {run.ranks.pids[0]} cannot be killed and still holds its memory and its GPU"
    kill()
    assert cause_of(result) == f"1: ValueError: bad image; {reason}"
    assert result.failure is not None
    assert result.failure.repeats, "a restart would find the GPU occupied"


def test_watchdog_names_rank_that_hangs_and_logs_its_traceback(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TRACEBACK_WAIT_SECONDS", 1.0)

    def wait(channel: PipeChannel) -> Outcome:
        channel.enter_phase(4, Phase.BACKWARD)
        time.sleep(100)
        return "finished"

    result = Supervised(wait, hang, folder=folder, watchdog=0.3).run()
    assert cause_of(result) == (
        "1: no progress for 0.3 s (run.watchdog); the other ranks wait for rank 1; this rank completed 3 steps and is "
        "in the forward pass; its traceback is in the log"
    )
    assert " in hang\n" in folder.log.read_text()
    assert " in wait\n" not in folder.log.read_text()


@pytest.mark.parametrize("loses_peer", [False, True])
def test_supervisor_blames_rank_that_others_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, loses_peer: bool
) -> None:
    # A rank that loses its connection exits by itself, so nothing is left to wait for.
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 30.0 if loses_peer else 0.1)
    both_train = multiprocessing.get_context("fork").Barrier(2)

    def time_out(channel: PipeChannel) -> Outcome:
        channel.enter_phase(4, Phase.BACKWARD)
        both_train.wait()
        raise RuntimeError("gloo: timed out")

    def fall_behind(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.DATA)
        both_train.wait()
        if loses_peer:
            raise RuntimeError("gloo: connection reset by peer")
        return hang(channel)

    details = "waiting for data" if loses_peer else "in the forward pass; its traceback is in the log"
    assert cause_of(Supervised(time_out, fall_behind).run()) == (
        "1: a collective timed out; the other ranks wait for rank 1; this rank completed 3 steps and is " + details
    )


def test_supervisor_blames_hung_rank_if_torch_aborts_rank_that_waits_for_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    both_train = multiprocessing.get_context("fork").Barrier(2)
    # The lines of torch's ProcessGroupNCCL when a collective times out.
    message = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=650, "
        "NumelOut=650, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    )
    lines = (
        f"[rank0]:[E1122 06:24:44.903881913 ProcessGroupNCCL.cpp:616] {message}\n"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {message}\n"
    )

    def time_out(channel: PipeChannel) -> Outcome:
        channel.enter_phase(4, Phase.BACKWARD)
        both_train.wait()
        os.write(2, lines.encode())
        return abort(channel)

    def fall_behind(channel: PipeChannel) -> Outcome:
        both_train.wait()
        return hang(channel)

    result = Supervised(time_out, fall_behind, folder=folder).run()
    assert result.failure is not None
    assert (result.failure.rank, result.failure.code) == (1, "rank-hung")


@pytest.mark.parametrize("saving", [True, False])
def test_failure_of_a_rank_does_not_cut_off_a_checkpoint_that_another_rank_writes(
    saving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    # A rank that does not save must not be waited for: the test would not end.
    monkeypatch.setattr(ranks, "SAVE_GRACE_SECONDS", 3600.0)

    def save_and_hang(channel: PipeChannel) -> Outcome:
        channel.set_saving(saving)
        if saving:
            time.sleep(0.6)
            (tmp_path / "saved").touch()
            channel.set_saving(False)
        return hang(channel)

    run = Supervised(save_and_hang, fail)
    assert cause_of(run.run()) == "1: ValueError: bad image"
    assert (tmp_path / "saved").exists() is saving


def test_progress_reporter_emits_each_step_that_all_ranks_completed_once() -> None:
    events: list[Event] = []
    heartbeats, reporter = Heartbeats(2), ProgressReporter(events.append, min_interval_s=0.0)
    for first, second in ((0, 0), (3, 0), (3, 2), (3, 2), (3, 3)):
        heartbeats.write(0, first, 0, Phase.FORWARD)
        heartbeats.write(1, second, 0, Phase.BACKWARD)
        reporter.poll(heartbeats)
    heartbeats.close()
    assert [event.step for event in events if isinstance(event, TrainingProgress)] == [2, 3]


def test_supervisor_shows_progress_of_ranks() -> None:
    def train(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.FORWARD)
        return wait_for_stop(channel)

    run = Supervised(train, train)

    def stop_once_shown() -> None:
        if any(isinstance(event, TrainingProgress) for event in run.events):
            run.signals.request_stop("SIGTERM")

    assert run.run(stop_once_shown) == RunResult("stopped")
    assert {event.step for event in run.events if isinstance(event, TrainingProgress)} == {3}

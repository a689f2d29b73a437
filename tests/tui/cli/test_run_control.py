"""`gputrain stop` and the requests of `gputrain runs`: what they send, wait for and say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer

import pytest

from engine.runs.control import consume_requests
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    Event,
    Profiled,
    RunContinued,
    RunFinished,
    RunPaused,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.gputrain_command import wait_for
from support.messages import says
from support.runs.event_factories import make_command_started, make_run_started
from support.runs.factories import append_events, make_run_folder, row_of
from support.runs.profiles import FAST_RANK, SLOW_RANK, make_profile, make_rank_profile, store_profile
from support.runs.run_owner import owner
from support.runs.trained_run import call
from tui.cli import run_control

PAUSED, CONTINUED = RunPaused(step=5, epoch=1), RunContinued(step=5, epoch=1)
ENDED = RunFinished(state="stopped", message="on request")
FULL_DISK = WarningEvent(message="the checkpoint of step 5 could not be written: disk full", code="not-writable")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    return tmp_path


@dataclass
class LiveRuns:
    """Runs that this process owns."""

    root: Path
    owners: dict[Path, Ownership] = field(default_factory=dict)

    def make(self, name: str, *events: Event) -> RunFolder:
        folder = make_run_folder(self.root, name, make_run_started(), *events)
        self.owners[folder.path] = Ownership(folder)
        return folder

    def end(self, folder: RunFolder) -> None:
        append_events(folder, ENDED)
        self.owners.pop(folder.path).release()

    def answer(self, folder: RunFolder, *events: Event) -> Thread:
        """Answer the next request in a thread, as the owner of a run does; without events, the run ends."""

        def wait_and_answer() -> None:
            wait_for(lambda: any(folder.control.glob("*.json")), "a request", 20)
            [request] = consume_requests(folder.control)
            append_events(folder, ControlEvent(request=request.request, by="me", outcome="at once"), *events)
            if not events:
                self.end(folder)

        thread = Thread(target=wait_and_answer)
        thread.start()
        return thread


@pytest.fixture
def live_runs(root: Path) -> Iterator[LiveRuns]:
    runs = LiveRuns(root)
    yield runs
    for ownership in runs.owners.values():
        ownership.release()


def checkpoint(step: int, *, requested: bool) -> CheckpointSaved:
    return CheckpointSaved(path=f"checkpoints/step-{step}.pt", step=step, epoch=1, requested=requested)


@pytest.mark.parametrize(
    ("request_name", "before", "answers", "printed"),
    [
        ("pause", (), (PAUSED,), "a is paused.\n"),
        ("pause", (), (PAUSED, CONTINUED), "a is paused.\n"),
        ("continue", (PAUSED,), (CONTINUED,), "a is running.\n"),
        ("continue", (PAUSED,), (CONTINUED, PAUSED), "a is running.\n"),
        ("checkpoint", (), (checkpoint(7, requested=True),), "a saved checkpoints/step-7.pt at step 7.\n"),
    ],
)
def test_request_waits_for_the_answer_of_the_run_whatever_follows(
    live_runs: LiveRuns, request_name: str, before: tuple[Event, ...], answers: tuple[Event, ...], printed: str
) -> None:
    run = live_runs.make("a", *before, checkpoint(3, requested=True))
    thread = live_runs.answer(run, checkpoint(6, requested=False), *answers)
    result = call("runs", request_name, "a")
    thread.join()
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", printed)


@pytest.mark.parametrize(
    ("request_name", "before", "opposite"), [("pause", (), "continue"), ("continue", (PAUSED,), "pause")]
)
def test_request_that_is_revoked_before_the_run_does_it_is_an_error(
    live_runs: LiveRuns, request_name: str, before: tuple[Event, ...], opposite: str
) -> None:
    run = live_runs.make("a", *before)
    # A continue request of a run that pauses later, and the other way round.
    thread = live_runs.answer(run, ControlEvent(request=opposite, by="you", outcome="immediately"))
    result = call("runs", request_name, "a")
    thread.join()
    assert result.exit_code == 1
    assert says(result.stderr, "wrong-state", f"error: a did not {request_name}", f"you sent a {opposite} request")


@pytest.mark.parametrize("command", [("stop",), ("runs", "pause")])
def test_silent_supervisor_is_named_once(
    live_runs: LiveRuns, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control, "PATIENCE_SECONDS", 0.3)
    run = live_runs.make("a", PAUSED)
    end = Timer(1.5, live_runs.end, [run])
    end.start()
    result = call(*command, "a")
    end.join()
    waiting, last = result.stderr.splitlines()
    assert waiting.startswith("Waiting for a to receive the request") and "it is stopped" in last.replace(
        "a is", "it is"
    )


def test_checkpoint_that_cannot_be_written_is_an_error(live_runs: LiveRuns) -> None:
    thread = live_runs.answer(live_runs.make("a"), FULL_DISK)
    result = call("runs", "checkpoint", "a")
    thread.join()
    assert (result.exit_code, result.stderr) == (1, f"error: {FULL_DISK.message}\n")


@pytest.mark.parametrize(
    ("request_name", "before", "answer"), [("pause", (), PAUSED), ("checkpoint", (), checkpoint(7, requested=True))]
)
def test_run_that_ends_before_it_answers_is_an_error(
    live_runs: LiveRuns, request_name: str, before: tuple[Event, ...], answer: Event
) -> None:
    threads = [
        live_runs.answer(live_runs.make("a", *before)),
        live_runs.answer(live_runs.make("b", *before), answer),
    ]
    result = call("runs", request_name, "a", "b")
    for thread in threads:
        thread.join()
    assert result.exit_code == 1
    other, error = sorted(result.stderr.splitlines())
    assert says(error, "not-running", "error: a ", request_name, "it is stopped") and other.startswith("b ")


def test_runs_that_are_not_running_get_no_request(root: Path, live_runs: LiveRuns) -> None:
    ended = make_run_folder(root, "ended", make_run_started(), ENDED)
    waiting = live_runs.make("waiting", WaitingForGpus(message="waits for 1 free GPU"))
    result = call("runs", "pause", "ended", "waiting")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert says(first, "not-running", "error: ended ", "stopped")
    assert says(second, "not-running", "error: waiting ", "it is waiting")
    assert not ended.control.exists() and not waiting.control.exists()


@pytest.mark.parametrize("request_name", ["pause", "continue", "checkpoint", "profile"])
def test_command_gets_no_request_that_only_trainings_answer(live_runs: LiveRuns, request_name: str) -> None:
    run = live_runs.make("a", make_command_started())
    result = call("runs", request_name, "a")
    assert result.exit_code == 1
    assert says(result.stderr, "not-supported", "error: a runs a command")
    assert not run.control.exists()


@pytest.mark.parametrize("command", [("stop",), ("runs", "pause")])
def test_no_wait_sends_one_request_to_each_run(live_runs: LiveRuns, command: tuple[str, ...]) -> None:
    runs = [live_runs.make("a"), live_runs.make("b")]
    result = call(*command, "a", "b", runs[0].path, "--no-wait")
    name = command[-1]
    assert result.exit_code == 0
    assert result.stderr == f"Sent the {name} request to a.\nSent the {name} request to b.\n"
    assert [[request.request for request in consume_requests(run.control)] for run in runs] == [[name], [name]]


def test_stop_waits_for_all_runs_and_names_those_that_do_not_run(root: Path, live_runs: LiveRuns) -> None:
    make_run_folder(root, "ended", make_run_started(), RunFinished(state="finished"))
    waiting = WaitingForGpus(message="waits for 1 free GPU")
    threads = [live_runs.answer(live_runs.make("a")), live_runs.answer(live_runs.make("b", waiting))]
    result = call("stop", "a", "ended", "b")
    for thread in threads:
        thread.join()
    assert result.exit_code == 0
    first, *others = result.stderr.splitlines()
    assert first == "ended is not running: it is finished."
    assert sorted(others) == ["a is stopped.", "b is stopped."]


def test_stop_removes_run_whose_wait_was_interrupted_from_the_queue(root: Path) -> None:
    with owner(root, detached=True) as owned:
        owned.queue().place.report("waits for 1 free GPU")
    assert row_of(owned.folder).state == "interrupted"
    result = call("stop", "a")
    assert (result.exit_code, result.stderr) == (0, "a is stopped.\n")
    assert row_of(owned.folder).state == "stopped"
    assert call("stop", "a").stderr == "a is not running: it is stopped.\n"


def test_profile_of_a_paused_run_is_awaited_and_printed_as_bars(
    live_runs: LiveRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = live_runs.make("a", PAUSED)
    name = store_profile(run, make_profile(make_rank_profile(0, FAST_RANK), make_rank_profile(1, SLOW_RANK)))
    thread = live_runs.answer(run, Profiled(step=120, epoch=3, steps=4, folder=f"profile/{name}"))
    result = call("runs", "profile", "a")
    thread.join()
    assert result.exit_code == 0, result.output
    assert "a is paused; the profile begins when it continues." in result.stderr
    assert "rank 1 is 49 ms slower in forward; rank 0 waits for it in backward" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines() if "█" in line] == ["rank", "rank", "░"]
    assert f"{run.path}/profile/{name}/rank-0.json.gz" in result.stdout


def test_run_that_gives_no_profile_is_not_waited_for_without_end(
    live_runs: LiveRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control, "MAX_WAIT_SECONDS", 0)
    live_runs.make("a")
    result = call("runs", "profile", "a")
    assert result.exit_code == 1
    assert says(result.output, "timed-out", " a ", "--stored")


def test_run_that_has_ended_is_asked_for_no_profile(root: Path) -> None:
    run = make_run_folder(root, "a", make_run_started(), RunFinished(state="finished"))
    result = call("runs", "profile", "a")
    assert result.exit_code == 1
    assert says(result.output, "not-running", "error: a ", "finished", "--stored")
    assert not run.control.exists()

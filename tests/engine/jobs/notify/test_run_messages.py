"""Each occasion of a session is found once, from the recorded events and the clock, and its message is worded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.notify_section import OCCASIONS
from engine.jobs.notify.message import (
    MAX_LINE_CHARS,
    MAX_LINES,
    MAX_TITLE_CHARS,
    Message,
    make_end_message,
    make_message,
    stall_sentence,
)
from engine.jobs.notify.run_messages import Outbox, RunMessages
from engine.runs.events import (
    Event,
    GpuEvent,
    GpusGranted,
    PhaseChanged,
    RankFailed,
    RunContinued,
    RunFinished,
    RunPaused,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.folder import RunFolder, RunState
from engine.runs.records import Bottleneck, BottleneckKind, GpuSample
from engine.runs.run_record import RunRecord
from support.replace import replace
from support.runs.event_factories import make_command_started, make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import (
    append_events,
    make_gpu_run_started,
    make_record,
    make_run_folder,
)

START = 1_000_000.0
FAILURE = RankFailed(time=START + 5, rank=1, device="cpu", cause="division by zero", code="rank-failed")
FINISHED = RunFinished(time=START + 9, state="finished", message="best accuracy 0.5000 in epoch 1")


class Sent(Outbox):
    """The messages that were put, instead of a thread that sends them."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.messages: list[Message] = []

    def put(self, message: Message) -> None:
        self.messages.append(message)


class ObservedRun:
    """A run and its messages with a clock that the test sets."""

    def __init__(self, folder: RunFolder, *overrides: str) -> None:
        self.folder, self.now = folder, 0.0
        self.watch(*overrides)

    def watch(self, *overrides: str) -> None:
        occasions = [] if any("when" in each for each in overrides) else [f"notify.when=[{','.join(OCCASIONS)}]"]
        config = resolve_config(None, ["notify.urls=[env:ANSWERS]", *occasions, *overrides]).config
        self._sent = Sent()
        self.messages = RunMessages(self.folder, config, self._sent, clock=lambda: self.now)

    def record(self, *events: Event) -> None:
        append_events(self.folder, *events)
        for event in events:
            self.messages.add(event)

    def take(self) -> list[Message]:
        """Return the messages since the last call."""
        self.messages.poll()
        found, self._sent.messages = self._sent.messages, []
        return found

    def poll(self, after_s: float = 1.0, events: tuple[Event, ...] = ()) -> list[str]:
        """Return the occasions of a poll `after_s` seconds after the last one."""
        self.now += after_s
        self.record(*events)
        return [message.occasion for message in self.take()]


@pytest.fixture
def run(tmp_path: Path) -> ObservedRun:
    return ObservedRun(make_run_folder(tmp_path / "runs", "digits-3"), "run.watchdog=600")


def test_finished_run_is_reported_once_with_result_diagnosis_and_command(run: ObservedRun) -> None:
    started = replace(make_run_started(START), batch_size=64)
    assert run.poll(events=(started, make_step(5, time=START + 1))) == []
    run.record(replace(make_epoch(1, time=START + 2), data_wait=0.5), FINISHED)
    (message,) = run.take()
    assert message.title == f"digits-3 finished on {socket.gethostname()}"
    assert message.level == "success"
    result, diagnosis, *rest = message.body.splitlines()
    assert result == FINISHED.message
    assert " 50% " in diagnosis and "data.workers=1" in diagnosis
    assert rest == [
        "1 of 3 epochs in 9s",
        f"gputrain attach digits-3 --runs-dir {run.folder.path.parent}",
    ]
    assert run.poll(events=(RunFinished(time=START + 10, state="failed"),)) == []


def test_failed_run_is_reported_with_rank_cause_and_resume_command(run: ObservedRun) -> None:
    run.folder.checkpoints.mkdir()
    (run.folder.checkpoints / "last.pt").touch()
    run.record(make_run_started(START), FAILURE, RunFinished(time=START + 6, state="failed", message="long"))
    (message,) = run.take()
    assert message.occasion == "failed"
    cause, *rest = message.body.splitlines()
    assert "rank 1 (cpu)" in cause and cause.endswith(FAILURE.cause)
    assert rest == [
        "0 of 3 epochs in 6s",
        f"gputrain resume digits-3 --runs-dir {run.folder.path.parent}",
    ]


def test_unselected_occasion_and_short_run_send_nothing(run: ObservedRun) -> None:
    run.watch("notify.when=[failed]")
    assert run.poll(events=(make_run_started(START), FINISHED)) == []
    run.watch("notify.min_minutes=1")
    assert run.poll(events=(make_run_started(START), FINISHED)) == []


def test_restart_of_ranks_is_no_crash(run: ObservedRun) -> None:
    assert run.poll(events=(make_run_started(START), FAILURE)) == []
    assert run.poll(events=(make_run_resumed(3, START + 20),)) == ["restarted"]
    assert run.poll(events=(make_step(4, time=START + 21),)) == []
    assert run.poll(events=(FINISHED,)) == ["finished"]


def test_earlier_sessions_are_not_reported(run: ObservedRun) -> None:
    run.record(make_run_started(1.0), replace(FAILURE, time=2.0), RunFinished(time=3.0, state="failed"))
    run.watch()
    assert run.poll() == []
    assert run.poll(events=(make_run_resumed(3, START), FINISHED)) == ["finished"]


def test_stall_is_reported_once_until_progress(run: ObservedRun) -> None:
    run.poll(events=(make_run_started(START), make_step(5, time=START + 1)))
    assert [run.poll(50) for _ in range(5)] == [[]] * 5
    run.now += 50
    (message,) = run.take()
    assert message.title.startswith("digits-3 makes no progress")
    sentence = message.body.splitlines()[0]
    assert all(value in sentence for value in ("5m00s", "step 5", "epoch 1", "10m00s", "run.watchdog"))
    assert [run.poll(50) for _ in range(9)] == [[]] * 9
    # The longest step so far took 750 s: three times as much is a stall.
    assert run.poll(events=(make_step(6, time=START + 800),)) == []
    assert [run.poll(50) for _ in range(44)] == [[]] * 44
    assert "stalled" in run.poll(50) + run.poll(50)


def test_pause_suspended_host_and_long_phases_are_no_stall(run: ObservedRun) -> None:
    run.poll(events=(make_run_started(START), make_step(5, time=START + 1)))
    run.record(RunPaused(time=START + 2, step=5, epoch=1))
    assert [run.poll(50) for _ in range(20)] == [[]] * 20
    run.record(RunContinued(time=START + 3, step=5, epoch=1))
    assert run.poll() == []
    assert run.poll(3600) == []
    run.record(PhaseChanged(time=START + 4, phase="validating", step=5, epoch=1))
    assert [run.poll(50) for _ in range(5)] == [[]] * 5
    run.record(make_epoch(1, time=START + 5))
    assert run.poll(40) == []
    # That evaluation took 240 s, so the next step may take 720 s.
    assert [run.poll(50) for _ in range(14)] == [[]] * 14
    assert run.poll(50) == ["stalled"]


def test_warnings_of_a_command_are_messages_and_its_journal_is_no_sign_of_a_stall(run: ObservedRun) -> None:
    run.poll(events=(make_command_started(START),))
    assert [run.poll(50) for _ in range(10)] == [[]] * 10
    for code, occasion in (("stalled", "stalled"), ("non-finite", "nan"), ("process-failed", "restarted")):
        assert run.poll(events=(WarningEvent(message="why", code=code),)) == [occasion]
    run.record(WarningEvent(message="loss is NaN at step 3", code="non-finite"))
    (message,) = run.take()
    assert (message.title.partition(" on ")[0], message.body.splitlines()[0]) == (
        "digits-3 has a loss that is not finite",
        "loss is NaN at step 3",
    )


def test_stall_detection_can_be_disabled(run: ObservedRun) -> None:
    run.watch("notify.stall_minutes=0")
    run.poll(events=(make_run_started(START),))
    assert [run.poll(50) for _ in range(40)] == [[]] * 40


def make_hot_sample(seconds: float, reason: str, clock_mhz: float = 900.0) -> GpuEvent:
    sample = GpuSample("GPU-0", "h", "ok", sm_clock=clock_mhz, max_sm_clock=1980.0, throttle=(reason,))  # type: ignore[arg-type]
    return GpuEvent(time=START + seconds, gpus=[sample])


def test_gpu_that_heat_throttles_for_a_minute_is_reported_once(run: ObservedRun) -> None:
    run.record(make_gpu_run_started(time=START))
    assert run.poll(events=tuple(make_hot_sample(5.0 * count, "hardware thermal") for count in range(4))) == ["slowed"]
    assert run.poll(events=(make_hot_sample(20.0, "hardware thermal"),)) == []


def test_gpu_that_runs_at_its_power_cap_is_reported_only_as_bottleneck(run: ObservedRun) -> None:
    run.record(make_gpu_run_started(time=START))
    assert run.poll(events=tuple(make_hot_sample(5.0 * count, "power cap") for count in range(20))) == []
    epoch = replace(make_epoch(1, time=START + 101), data_wait=0.01)
    assert run.poll(events=(epoch,)) == ["slowed"]


def test_granted_gpus_are_reported_after_a_wait(run: ObservedRun) -> None:
    run.record(WaitingForGpus(message="no GPU is free"), GpusGranted(devices=["GPU-a", "GPU-b"], seconds=7500.0))
    (message,) = run.take()
    assert message.occasion == "granted"
    sentence = message.body.splitlines()[0]
    assert all(value in sentence for value in ("2 GPUs", "2h05m", "GPU-a, GPU-b"))
    assert run.poll() == []


RECORD = make_record(
    state=RunState.STOPPED,
    epochs=2,
    total_epochs=3,
    best_val_accuracy=0.75,
    bottleneck=Bottleneck(kind=BottleneckKind.DATA, message="disk"),
    seconds=65.0,
)


def body_lines(occasion: str, *, resumable: bool = True, record: RunRecord = RECORD) -> list[str]:
    return make_message(occasion, "sentence", "h", Path("/r/a"), record, resumable=resumable).body.splitlines()  # type: ignore[arg-type]


def test_message_has_progress_and_best_accuracy_unless_its_sentence_has_it() -> None:
    stopped, finished = body_lines("stopped")[2], body_lines("finished")[2]
    assert [part for part in ("2 of 3", "1m05s", "0.7500") if part not in stopped] == []
    assert "2 of 3" in finished and "0.7500" not in finished


@pytest.mark.parametrize(
    ("occasion", "command"),
    [("finished", "attach"), ("crashed", "resume"), ("stalled", "attach")],
)
def test_message_ends_with_command_to_resume_only_after_an_early_end(occasion: str, command: str) -> None:
    assert body_lines(occasion)[-1] == f"gputrain {command} a --runs-dir /r"
    assert body_lines(occasion, resumable=False)[-1] == "gputrain attach a --runs-dir /r"


def test_end_message_has_level_of_occasion_and_last_lines() -> None:
    lines = [str(number) for number in range(MAX_LINES + 2)]
    message = make_end_message("failed", "sweep-1", "host", lines)
    assert (message.occasion, message.level) == ("failed", "failure")
    assert message.title.startswith("sweep-1 ") and message.title.endswith(" host")
    assert message.body.splitlines() == lines[2:]


def test_message_lines_are_cut_only_above_their_limit() -> None:
    message = make_end_message(
        "finished", "n" * MAX_TITLE_CHARS, "h", ["x" * MAX_LINE_CHARS, "y" * (MAX_LINE_CHARS + 1)]
    )
    assert len(message.title) == MAX_TITLE_CHARS
    assert message.body.splitlines() == ["x" * MAX_LINE_CHARS, "y" * (MAX_LINE_CHARS - 1) + "…"]


def test_stall_sentence_names_phase_and_only_a_watchdog_still_to_come() -> None:
    record = replace(RECORD, values=RECORD.values | {"step": 1234}, current_epoch=2, phase="validating")
    sentence = stall_sentence(record, 300.0, 600.0)
    assert [part for part in ("5m00s", "1,234", "validating", "10m00s", "run.watchdog") if part not in sentence] == []
    assert "run.watchdog" not in stall_sentence(record, 300.0, 300.0)

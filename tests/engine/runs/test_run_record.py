"""The record of a run: what its owner writes while it trains, and that it is what the journal says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.codec import decode, encode
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    Event,
    GpuEvent,
    GpusGranted,
    PhaseChanged,
    RankFailed,
    RunContinued,
    RunFinished,
    RunPaused,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.fields import find_field
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import history_from_events
from engine.runs.journal import JournalReader
from engine.runs.record_completion import read_journal_record
from engine.runs.recorder import RECORD_INTERVAL_SECONDS, Recorder
from engine.runs.records import GpuSample
from engine.runs.run_record import RunRecord, StoredForm, read_back, read_run_record, shown_state, stored_form
from engine.runs.run_row import read_row
from support.gputrain_command import ROOT
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import make_record, make_run_folder
from support.runs.recording_process import STEPS_PER_RECORD

KILLS = 20
STATES = st.sampled_from(["finished", "stopped", "failed"])
scores = st.one_of(st.none(), st.floats(0, 1))


@st.composite
def epochs(draw: st.DrawFn, number: int) -> Event:
    epoch = make_epoch(number, draw(st.floats(0, 1)))
    metrics = draw(st.dictionaries(st.sampled_from(["f1", "val/loss"]), scores))
    ema = {"ema_val_loss": draw(scores), "ema_val_accuracy": draw(scores)} if draw(st.booleans()) else {}
    rate, step = draw(st.sampled_from([0.0, 50.0, 200.0])), draw(st.integers(0, 60))
    return replace(epoch, metrics=metrics, step=step, images_per_second=rate, val_accuracy=draw(scores), **ema)


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Any event that ranks and supervisor record between the start and the end of a session."""
    step, epoch = draw(st.integers(0, 60)), draw(st.integers(1, 6))
    made = draw(
        st.sampled_from(
            [
                make_step(step, epoch),
                replace(make_step(step, epoch), grad_norm=None),
                PhaseChanged(phase="validating", step=step, epoch=epoch),
                PhaseChanged(phase="saving", step=step, epoch=epoch),
                CheckpointSaved(path="checkpoints/a.pt", step=step, epoch=epoch),
                RunPaused(step=step, epoch=epoch),
                RunContinued(step=step, epoch=epoch),
                ControlEvent(request="stop", by="a", outcome=""),
                GpuEvent(gpus=[GpuSample(uuid="GPU-0", host="h", util=50.0, power=100.0, throttle=["power cap"])]),
                RankFailed(rank=0, device="cpu", cause="it failed", code="failed"),
                WarningEvent(message="on the CPU", code="no-gpu", cpu_fallback=True),
            ]
        )
    )
    return draw(st.one_of(st.just(made), epochs(epoch)))


@st.composite
def sessions(draw: st.DrawFn, is_first: bool) -> list[Event]:
    """One session of a run, which waits, trains and ends, or crashes."""
    waits = [WaitingForGpus(message="waits"), GpusGranted(devices=[], seconds=1.0)]
    start = make_run_started() if is_first else make_run_resumed(draw(st.integers(0, 40)), 0.0)
    middle = draw(st.lists(events(), max_size=12))
    parts = [*(waits if draw(st.booleans()) else []), start, *middle, RunFinished(state=draw(STATES), message="m")]
    kept = parts if draw(st.booleans()) else parts[: draw(st.integers(0, len(parts)))]
    clock = draw(st.floats(0, 1e6))
    return [replace(event, time=round(clock + 2 * index, 3)) for index, event in enumerate(kept)]


@st.composite
def runs(draw: st.DrawFn) -> list[list[Event]]:
    return [draw(sessions(is_first=index == 0)) for index in range(draw(st.integers(1, 4)))]


@given(runs())
def test_record_is_that_of_the_journal_after_each_session_that_ends(run: list[list[Event]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = make_run_folder(Path(root), "a")
        for session in run:
            recorder = Recorder(folder, Config(), lambda _: None)
            for event in session:
                recorder.record(event)
            recorder.close()
            written, history = read_run_record(folder), history_from_events(JournalReader(folder.journal).poll())
            if session and isinstance(session[-1], RunFinished):
                assert written == history.record({})
            assert written is None or read_back(decode(encode(stored_form(written)), StoredForm)) == written


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a")


def written_record(folder: RunFolder) -> RunRecord:
    """The record in the file, all of whose fields are valid."""
    return read_back(decode(folder.summary.read_bytes(), StoredForm))


def test_recorder_replaces_record_once_a_second_and_at_each_change_of_state(recorded: RunFolder) -> None:
    now = [0.0]
    recorder = Recorder(recorded, Config(), lambda _: None, clock=lambda: now[0])
    seen = []
    for event in (
        WaitingForGpus(message="waits for 2 free GPUs"),
        make_run_started(),
        make_step(1),
        make_step(2),
        RunPaused(step=2, epoch=1),
        RunContinued(step=2, epoch=1),
        ControlEvent(request="stop", by="a", outcome=""),
        make_step(3),
    ):
        recorder.record(event)
        record = written_record(recorded)
        seen.append((record.state, record.values.get("step")))
    assert seen == [
        *(("waiting", 0), ("running", 0), ("running", 0), ("running", 0)),
        *(("paused", 2), ("running", 2), ("stopping", 2), ("stopping", 2)),
    ]
    now[0] += RECORD_INTERVAL_SECONDS
    # The loop of the owner calls it, so the last events before a long evaluation are not missed.
    recorder.catch_up()
    assert written_record(recorded).values["step"] == 3
    recorder.close()


def test_record_of_ended_run_stays_until_its_resume_trains(recorded: RunFolder) -> None:
    first = Recorder(recorded, Config(), lambda _: None)
    first.record(make_run_started())
    first.record(RunFinished(state="stopped"))
    first.close()
    # A resume that fails while its ranks start leaves the run as it was.
    second = Recorder(recorded, Config(), lambda _: None)
    before = recorded.summary.stat().st_mtime_ns
    second.record(WarningEvent(message="a key has no effect", code="no-effect"))
    assert recorded.summary.stat().st_mtime_ns == before
    assert written_record(recorded).state is RunState.STOPPED
    for event, state in (
        (WaitingForGpus(message="waits for 2 free GPUs"), RunState.WAITING),
        (GpusGranted(devices=[], seconds=1.0), RunState.STARTING),
        (make_run_resumed(0, 9.0), RunState.RUNNING),
    ):
        second.record(event)
        assert written_record(recorded).state is state
    second.close()


def test_recorder_without_config_keeps_the_stored_values(recorded: RunFolder) -> None:
    config = resolve_config(None, ["optim.lr=0.5"]).config
    first = Recorder(recorded, config, lambda _: None)
    first.record(make_run_started())
    first.close()
    second = Recorder(recorded, None, lambda _: None)
    second.record(RunFinished(state="stopped"))
    second.close()
    record = written_record(recorded)
    assert record.config is not None and record.config["optim.lr"] == 0.5


def test_record_is_not_ahead_of_a_journal_that_cannot_be_written(
    recorded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    recorder = Recorder(recorded, Config(), lambda _: None, clock=lambda: now[0])
    recorder.record(make_run_started())
    recorder.record(make_step(1))
    with monkeypatch.context() as patch:
        patch.setattr("engine.runs.journal.os.write", fail_to_write)
        for step in (2, 3):
            now[0] += RECORD_INTERVAL_SECONDS
            recorder.record(make_step(step))
        record = written_record(recorded)
        assert record.values.get("step") <= 1 and "full" in record.problem
    recorder.catch_up()
    now[0] += RECORD_INTERVAL_SECONDS
    recorder.record(make_step(4))
    record = written_record(recorded)
    assert (record.values.get("step"), record.problem) == (4, "")
    recorder.close()


def fail_to_write(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.nightly
def test_record_of_killed_run_is_never_ahead_of_its_journal_and_shows_it_as_crashed(tmp_path: Path) -> None:
    for number in range(KILLS):
        folder = RunFolder(tmp_path / f"run-{number}")
        command = [sys.executable, "-m", "support.runs.recording_process", str(tmp_path), folder.name]
        process = subprocess.Popen(command, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
        while (record := read_run_record(folder)) is None or record.values.get("step") == 0:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(number * 0.4 / KILLS)
        process.send_signal(signal.SIGKILL)
        process.wait()
        record, events = read_run_record(folder), list(JournalReader(folder.journal).poll())
        assert record is not None
        steps = [event for event in events if isinstance(event, StepEvent)]
        assert record.values.get("step") <= steps[-1].step
        # The clock of the process counts its steps.
        assert steps[-1].step - record.values.get("step") <= STEPS_PER_RECORD
        row = read_row(folder)
        assert row is not None and (row.state, row.record.state) == (RunState.CRASHED, RunState.RUNNING)
        assert read_journal_record(folder).record.values.get("step") == steps[-1].step


def test_record_is_not_written_at_each_event_while_the_disk_is_full(
    recorded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(recorded, Config(), lambda _: None, clock=lambda: 0.0)
    recorder.record(make_run_started())
    writes = []
    monkeypatch.setattr("engine.runs.recorder.write_summary", lambda *_, **__: writes.append(1))
    monkeypatch.setattr("engine.runs.journal.os.write", fail_to_write)
    recorder.record(ControlEvent(request="stop", by="a", outcome=""))
    for step in range(1, 50):
        recorder.record(make_step(step))
    # At the change of the state, and at that of the problem.
    assert 1 <= len(writes) <= 2
    monkeypatch.undo()
    recorder.close()


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("value", [deep(800), "x" * 2000, list(range(300)), 1e999, 1 << 70])
def test_record_of_others_has_no_config_value_without_bounds(recorded: RunFolder, value: object) -> None:
    stored = json.loads(recorded.summary.read_bytes())
    stored["config"] = {"model.name": value, "optim.lr": 0.5, "model.options": {"width": [1, {"depth": 2}]}}
    recorded.summary.write_text(json.dumps(stored))
    row = read_row(recorded)
    assert row is not None and row.state == "crashed"
    # A config with such a value counts as unknown.
    assert row.record.config is None and find_field("model.name").value(row) is None


def test_record_has_throughput_and_remaining_time_only_while_it_trains() -> None:
    trained = [make_run_started(), make_step(5), make_epoch(1)]
    assert history_from_events(trained).record().values.get("rate_now") is not None
    for event in (
        WaitingForGpus(message="waits"),
        RunPaused(step=10, epoch=1),
        RankFailed(rank=0, device="cpu", cause="it failed", code="failed"),
        RunFinished(state="stopped"),
        make_run_resumed(10, 2.0),
    ):
        record = history_from_events([*trained, event]).record()
        assert "rate_now" not in record.values
        assert "eta_seconds" not in record.values or record.state is RunState.RUNNING


FORMAT_1 = Path(__file__).parents[2] / "recordings" / "format-1" / "records"


@pytest.mark.parametrize(
    ("state", "values", "shown"),
    [
        ("running", {"command": "x", "metrics": {"train loss": None}}, "running"),
        ("failed", {"command": "x", "metrics": {"train loss": None}}, "failed"),
        ("finished", {"command": "x", "metrics": {"train loss": None, "acc": 0.5}}, "diverged"),
        ("finished", {"command": "x", "metrics": {"train loss": 0.1, "grad norm": None}}, "finished"),
        ("ended", {"metric_names": {"val_loss": "eval_loss"}, "val_loss": None}, "diverged"),
        ("quiet", {"metric_names": {"val_loss": "eval_loss"}, "val_loss": 0.1}, "quiet"),
    ],
)
def test_shown_state_marks_run_whose_last_loss_is_not_finite(state: str, values: dict[str, Any], shown: str) -> None:
    assert shown_state(state, make_record(**values)) == shown


@pytest.mark.parametrize("name", ["training", "command"])
def test_kept_record_is_read_and_written_with_the_same_keys(name: str) -> None:
    """Both are of the version in which each number was a field of its own. The config, the times and so on are there,
    too."""
    data = (FORMAT_1 / f"{name}.json").read_bytes()
    record = read_back(decode(data, StoredForm))
    written = json.loads(encode(stored_form(record)))
    # Earlier versions judged the learning, too, and summed up the readings of the GPUs.
    kept = {key: value for key, value in json.loads(data).items() if key not in ("learning", "gpu_stats")}
    assert written | kept == written
    expected = {
        "training": {"best_val_accuracy": 0.8, "val_top5": 0.99, "seconds": 31.0, "metrics.f1": None, "steps": 30},
        "command": {"step": 9, "train_loss": 0.25, "best_val_loss": 0.1, "lr": 0.001, "metrics.ppl": None},
    }[name]
    assert expected.items() <= record.values.items()
    assert name == "training" or {"epochs", "val_loss"}.isdisjoint(record.values)


def test_record_of_command_without_metrics_has_no_step() -> None:
    record = make_record(command="x", step=0, epochs=0)
    assert "step" not in record.values and json.loads(encode(stored_form(record)))["step"] == 0

"""Step, epoch and phase of a run, its devices and its early stop, derived from its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.run_sections import RunConfig
from engine.jobs.launch.ranks import describe_early_stop, is_complete
from engine.runs.event_lines import event_line, event_lines
from engine.runs.events import (
    CheckpointSaved,
    Event,
    FinalTest,
    PhaseChanged,
    RunContinued,
    RunFinished,
    RunPaused,
)
from engine.runs.fields import find_field
from engine.runs.history import EarlyStop, describe_run_devices, has_stopped_early, history_from_events
from engine.runs.monitor import monitor_of
from engine.runs.records import RankDevice
from engine.runs.run_record import RunRecord
from support.replace import replace
from support.runs.event_factories import make_command_started, make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import make_run_folder, row_of

STARTED = make_run_started()  # 10 steps per epoch


def phase(name: str, step: int, epoch: int) -> PhaseChanged:
    return PhaseChanged(phase=name, step=step, epoch=epoch)


@pytest.mark.parametrize(
    ("events", "place"),
    [
        ([phase("validating", 10, 1), make_step(8)], (10, 1, "validating")),
        ([make_step(19, epoch=2), make_run_resumed(12, 9.0)], (12, 2, "")),
    ],
    ids=["a step that is reported late", "a resume from an earlier checkpoint"],
)
def test_history_has_the_place_of_the_run(events: list[Event], place: tuple[int, int, str]) -> None:
    history = history_from_events([STARTED, *events])
    assert (history.steps_done, history.current_epoch, history.phase) == place


def test_history_estimates_the_end_by_the_median_epoch() -> None:
    epochs = [replace(make_epoch(number), seconds=seconds) for number, seconds in ((1, 90.0), (2, 4.0), (3, 30.0))]
    history = history_from_events([STARTED, *epochs])
    assert history.eta_s == 30.0 * (STARTED.epochs - 3)


def test_history_duration_leaves_out_clock_that_was_set_back() -> None:
    events = [
        make_run_started(5000.0),
        make_epoch(1, time=5010.0),
        make_epoch(2, time=1410.0),
        make_epoch(3, time=1420.0),
    ]
    history = history_from_events(events)
    assert history.total_seconds == 20.0
    history.add(RunFinished(time=1425.0, state="finished"))
    # The next session began an hour before the end of the first, by the clock.
    for event in (make_run_resumed(30, time=200.0), make_epoch(4, time=207.0)):
        history.add(event)
    assert history.total_seconds == 25.0 + 7.0


def test_history_has_test_of_the_latest_session() -> None:
    tested = FinalTest(step=20, epoch=1, images=6, skipped_images=0, loss=0.25, accuracy=0.75, top5=1.0, metrics={})
    events = [STARTED, make_epoch(1), make_epoch(2), tested]
    record = history_from_events(events).record()
    assert (record.values.get("test_loss"), record.values.get("test_accuracy")) == (0.25, 0.75)
    line = event_line(tested)
    assert line is not None and "loss 0.2500 acc 0.7500" in line and "epoch 1" in line and "6 images" in line
    resumed = history_from_events([*events, make_run_resumed(20, time=9.0)]).record()
    assert {"test_loss", "test_accuracy"}.isdisjoint(resumed.values)


def test_history_duration_leaves_out_pauses() -> None:
    history = history_from_events([make_run_started(100.0), RunPaused(time=110.0, step=5, epoch=1)])
    for time in (200.0, 300.0):
        # A checkpoint that is requested during the pause is no training either.
        history.add(CheckpointSaved(time=time, path="last.pt", step=5, epoch=1))
        assert history.total_seconds == 10.0
    history.add(RunContinued(time=400.0, step=5, epoch=1))
    history.add(make_epoch(1, time=420.0))
    assert history.total_seconds == history.record().seconds == 30.0


@pytest.mark.parametrize("end", [RunFinished(time=900.0, state="stopped"), make_run_resumed(5, 900.0)])
def test_history_duration_of_session_that_ends_in_a_pause_ends_with_it(end: Event) -> None:
    """It is stopped, or it crashes and is resumed."""
    saved = CheckpointSaved(time=500.0, path="last.pt", step=5, epoch=1)
    events = [make_run_started(100.0), RunPaused(time=110.0, step=5, epoch=1), saved, end]
    assert history_from_events(events).seconds == 10.0


@pytest.mark.parametrize(
    ("patience", "min_delta", "accuracies", "epochs"),
    [
        (0, 0.0, [0.5] * 20, None),
        (2, 0.0, [0.1, 0.2, 0.2, 0.2, 0.9], 4),
        (2, 0.0, [0.1, 0.2, 0.1, 0.3, 0.2, 0.3], 6),
        # Gains of less than 0.05 each add up to one that counts.
        (2, 0.05, [0.1, 0.13, 0.16, 0.17, 0.18, 0.19], 5),
        (1, 0.0, [-1.0, -1.0], 2),
    ],
)
def test_early_stop_expires_after_patience(
    patience: int, min_delta: float, accuracies: list[float], epochs: int | None
) -> None:
    run = RunConfig(early_stop=patience, early_stop_min_delta=min_delta)
    events = [make_epoch(number, accuracy) for number, accuracy in enumerate(accuracies, 1)]
    histories = [history_from_events(events[:number]) for number in range(len(events) + 1)]
    assert next((len(each.epochs) for each in histories if has_stopped_early(run, each)), None) == epochs


def test_history_monitored_by_a_minimum_chooses_its_epoch_and_stops_early() -> None:
    started = replace(make_run_started(), monitor="rmse", monitor_mode="min")
    epochs = [replace(make_epoch(number, 0.9), metrics={"rmse": 1 / number}) for number in (1, 4, 2)]
    epochs = [replace(epoch, epoch=number) for number, epoch in enumerate(epochs, 1)]
    # A value that is not finite is never the best one, and no improvement.
    unknown = replace(make_epoch(4, 0.99), metrics={"rmse": None})
    history = history_from_events([started, *epochs, unknown])
    record = history.record()
    assert history.best is not None and history.best.epoch == 2
    assert (record.monitor, record.values["best"], record.values["best_epoch"]) == ("rmse", 0.25, 2)
    assert record.values["best_val_accuracy"] == 0.9, "of the best epoch"
    stops = [has_stopped_early(RunConfig(early_stop=patience), history) for patience in (2, 3)]
    assert stops == [True, False]


def test_early_stop_continues_from_checkpoint() -> None:
    run = RunConfig(early_stop=3)
    whole = EarlyStop(run, monitor_of("accuracy"))
    for accuracy in (0.1, 0.5, 0.4):
        whole.step(accuracy)
    for saved in (whole, EarlyStop(run, monitor_of("accuracy"))):
        resumed = EarlyStop(run, monitor_of("accuracy"))
        resumed.load_state_dict(saved.state_dict())
        assert resumed.state_dict() == saved.state_dict()


def test_lifecycle_reports_early_stop_and_has_nothing_left_until_patience_grows() -> None:
    started = replace(make_run_started(), epochs=9)
    history = history_from_events([started, make_epoch(1, 0.5), make_epoch(2, 0.4), make_epoch(3, 0.5)])
    assert describe_early_stop(history) == "stopped early after 3 of 9 epochs (run.early_stop)"
    runs = (RunConfig(epochs=9, early_stop=2), RunConfig(epochs=20, early_stop=2), RunConfig(epochs=9, early_stop=3))
    assert [is_complete(run, history) for run in (*runs, RunConfig(epochs=9), RunConfig(epochs=3))] == [
        *(True, True, False),
        *(False, True),
    ]
    assert describe_early_stop(history_from_events([replace(started, epochs=3), make_epoch(3)])) == ""


H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
FINISHED = RunFinished(time=9.0, state="finished", message="best accuracy 0.9")


def gpu(rank: int, name: str = H200, index: int | None = None, host: str = "h") -> RankDevice:
    return RankDevice(rank, host, 7, f"GPU-{rank}", name, rank if index is None else index)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([gpu(0, index=0), gpu(1, index=3)], "2 x H200 (GPU 0, 3)"),
        ([gpu(0, index=5)], "H200 (GPU 5)"),
        ([gpu(0), gpu(1, A100), gpu(2)], "2 x H200 (GPU 0, 2) and 1 x A100-SXM4-80GB (GPU 1)"),
        ([gpu(0), gpu(1), gpu(2, host="i"), gpu(3, host="i")], "4 x H200 on 2 hosts"),
        ([RankDevice(0, "h", 7, "GPU-0"), RankDevice(1, "h", 8, "GPU-1")], "2 GPUs"),
        ([RankDevice(0, "h", 7, "cpu"), RankDevice(1, "h", 8, "cpu")], "the CPU (2 ranks)"),
        ([RankDevice(0, "h", 7, "cpu")], "the CPU"),
    ],
)
def test_describe_run_devices_names_gpus(ranks: list[RankDevice], text: str) -> None:
    devices = [record.device for record in ranks]
    started = replace(make_run_started(), ranks=ranks, devices=devices, world_size=len(ranks))
    assert describe_run_devices(started) == text


def last_lines(*events: Event) -> tuple[list[str], RunRecord]:
    history = history_from_events(events)
    return event_lines(events[-1], history), history.record()


def test_mean_epoch_time_is_that_of_full_epochs_since_the_resume() -> None:
    epochs = [replace(make_epoch(number), seconds=float(number)) for number in range(1, 5)]
    resumed = make_run_resumed(15, 5.0)
    lines, summary = last_lines(make_run_started(), *epochs[:2], resumed, *epochs[1:], FINISHED)
    assert lines[-1] == "2 epochs since the resume on the CPU (2 ranks), 3.5 s per epoch"
    assert summary.seconds_per_epoch == 3.5
    lines, summary = last_lines(make_run_started(), epochs[0], resumed, epochs[1], FINISHED)
    assert lines[-1] == "finished: best accuracy 0.9"
    assert summary.seconds_per_epoch is None


def test_record_tells_command_devices_duration_and_exit_code() -> None:
    rank = RankDevice(0, "h", 1, "GPU-1", "NVIDIA H200", 3)
    started = make_command_started(2.0, devices=["GPU-1"], ranks=[rank])
    record = history_from_events([started, RunFinished(time=9.0, state="failed", exit_code=3)]).record()
    assert (record.command, record.devices, record.values.get("gpus")) == (started.command, "H200 (GPU 3)", 1)
    assert (record.seconds, record.exit_code, record.command_parameters) == (7.0, 3, {"lr": 0.1})


def test_log_line_of_the_start_names_process_devices_and_command() -> None:
    assert event_line(make_command_started()) == "a: process 1 on the CPU: python train.py --lr 0.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.1),
        ("optim.lr", 0.1),
        ("command", "python train.py --lr 0.1"),
        ("exit_code", None),
        ("model.name", None),
    ],
)
def test_fields_of_a_row_are_those_of_the_command(tmp_path: Path, name: str, value: object) -> None:
    row = row_of(make_run_folder(tmp_path, "a", make_command_started()))
    assert find_field(name).value(row) == value
    assert row.to_json()["config"] == {}


def test_config_key_is_a_parameter_of_its_name_unless_other_keys_have_that_name(tmp_path: Path) -> None:
    parameters = {"name": "bert-1", "weight_decay": 0.1}
    row = row_of(make_run_folder(tmp_path, "a", make_command_started(parameters=parameters)))
    values = {key: find_field(key).value(row) for key in ("model.name", "optim.name", "optim.weight_decay")}
    assert values == {"model.name": None, "optim.name": None, "optim.weight_decay": 0.1}

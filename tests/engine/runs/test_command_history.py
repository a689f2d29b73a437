"""State, record, row and lines of the run of a command, from its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runs.event_lines import event_line
from engine.runs.events import ControlEvent, GpusGranted, RunFinished, WaitingForGpus
from engine.runs.fields import find_field
from engine.runs.folder import RunState
from engine.runs.history import history_from_events
from engine.runs.records import RankDevice
from support.runs.event_factories import make_command_started
from support.runs.factories import make_run_folder, row_of

STOP = ControlEvent(time=2.0, request="stop", by="me", outcome="SIGINT sent")


def test_state_follows_the_command() -> None:
    events = [
        (WaitingForGpus(time=0.0, message="for GPUs"), RunState.WAITING),
        (GpusGranted(time=1.0, devices=[], seconds=1.0), RunState.STARTING),
        (make_command_started(2.0), RunState.RUNNING),
        (STOP, RunState.STOPPING),
        (RunFinished(time=3.0, state="stopped", exit_code=-2), RunState.STOPPED),
        (make_command_started(4.0), RunState.RUNNING),
        (RunFinished(time=5.0, state="finished", exit_code=0), RunState.FINISHED),
    ]
    history = history_from_events([])
    states = []
    for event, _ in events:
        history.add(event)
        states.append(history.state)
    assert states == [state for _, state in events]


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

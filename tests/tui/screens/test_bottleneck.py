"""The bottleneck message on the run screen, in the run list, the log and summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.schema import Config
from engine.runs.event_lines import event_line, event_lines
from engine.runs.events import Event, RunFinished, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.history import history_from_events
from engine.runs.journal import to_line
from engine.runs.recorder import Recorder
from engine.runs.run_row import RunRow
from support.replace import replace
from support.runs.factories import make_gpu_run_started, make_run_folder, make_timed_epoch, row_of
from tui.cli.progress import PlainPrinter
from tui.screens.run_progress import bottleneck_text

GPU_RUN = make_gpu_run_started(flops=12.3e9, peak_tflops=3957.6)
DATA_WAIT_EPOCH = make_timed_epoch(data_wait=0.34)
FINISHED = RunFinished(time=200.0, state="finished")


def row(root: Path, *events: Event) -> RunRow:
    return row_of(make_run_folder(root, "a", *events))


def with_record(run_row: RunRow, **changes: Any) -> RunRow:
    return run_row._replace(record=replace(run_row.record, **changes))


def test_bottleneck_text_fits_width(tmp_path: Path) -> None:
    run_row = row(tmp_path, GPU_RUN, DATA_WAIT_EPOCH)._replace(state="running")
    assert bottleneck_text(run_row, 80).plain == (
        " waiting for data 34% of the time; try data.workers=4    data wait 34%   MFU 6%"
    )
    assert bottleneck_text(run_row, 78).plain == " waiting for data 34% of the time; try data.workers=4"
    assert bottleneck_text(run_row, 30).plain == " waiting for data 34% of the…"
    assert bottleneck_text(with_record(run_row, bottleneck=None), 80).plain == " data wait 34%   MFU 6%"
    assert bottleneck_text(with_record(run_row, bottleneck=None, data_wait=None, mfu=None), 80).plain == ""


def test_bottleneck_message_fits_80_columns_or_starts_with_advice() -> None:
    for events in (
        [GPU_RUN, make_timed_epoch()],
        [make_gpu_run_started(devices=["cpu"]), make_timed_epoch()],
        [GPU_RUN, DATA_WAIT_EPOCH],
        [replace(GPU_RUN, small_step_seconds=0.01), make_timed_epoch()],
    ):
        bottleneck = history_from_events(events).bottleneck
        assert bottleneck is not None
        assert len(bottleneck.message) <= 78
    bottleneck = history_from_events([make_gpu_run_started(workers=8), DATA_WAIT_EPOCH]).bottleneck
    assert bottleneck is not None
    assert "try smaller images" in bottleneck.message[:78]


def test_run_row_before_first_epoch_uses_data_wait_of_latest_steps(tmp_path: Path) -> None:
    step = StepEvent(time=1.0, step=5, epoch=1, losses=[1.0], lr=0.1, images_per_second=9.0, data_wait=0.2)
    record = row(tmp_path, GPU_RUN, step).record
    assert (record.data_wait, record.mfu, record.bottleneck) == (0.2, None, None)


def test_run_row_json_has_bottleneck(tmp_path: Path) -> None:
    values = row(tmp_path, GPU_RUN, DATA_WAIT_EPOCH, FINISHED).to_dict()
    assert (values["data_wait"], values["mfu"]) == (0.34, 0.0622)
    message = "waiting for data 34% of the time; try data.workers=4"
    assert values["bottleneck"] == {"kind": "waiting for data", "message": message}


def test_run_row_reads_bottleneck_from_record(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", GPU_RUN, DATA_WAIT_EPOCH)
    stored = {"format": 1, "state": "running", "started_at": 1.0}
    found = {"kind": "slowed down", "message": "GPU-0 since 14:05"}
    folder.summary.write_text(json.dumps(stored | {"bottleneck": found}))
    bottleneck = row_of(folder).record.bottleneck
    assert bottleneck is not None and bottleneck.message == "GPU-0 since 14:05"
    folder.summary.write_text(json.dumps(stored | {"bottleneck": ["not a bottleneck"]}))
    assert row_of(folder).record.bottleneck is None


def test_recorder_writes_bottleneck_to_summary_and_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    recorder = Recorder(folder, Config(), lambda _: None)
    for event in (GPU_RUN, DATA_WAIT_EPOCH, FINISHED):
        recorder.record(event)
    recorder.close()
    summary = json.loads(folder.summary.read_text())
    message = "waiting for data 34% of the time; try data.workers=4"
    assert summary["bottleneck"] == {"kind": "waiting for data", "message": message}
    assert (summary["data_wait"], summary["mfu"]) == (0.34, 0.0622)
    log_lines = [line[21:] for line in folder.log.read_text().splitlines()]
    assert log_lines[-3:] == [
        f"{message} (data wait 34%, MFU 6%)",
        "finished",
        "1 epoch on 4 GPUs, 1.0 s per epoch",
    ]


def test_plain_printer_prints_bottleneck_before_end(capsys: pytest.CaptureFixture[str]) -> None:
    printer = PlainPrinter()
    for event in (make_gpu_run_started(devices=["cpu"], flops=float("nan")), make_timed_epoch(), FINISHED):
        printer(event)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3:] == [
        "CPU-bound: a GPU, more cores or a smaller model would help (data wait 1%)",
        "finished",
        "1 epoch on the CPU (4 ranks), 1.0 s per epoch",
    ]


def test_lines_of_failed_run_omit_bottleneck() -> None:
    failed = RunFinished(time=200.0, state="failed", message="rank 1 failed")
    assert event_lines(failed, history_from_events([GPU_RUN, DATA_WAIT_EPOCH, failed])) == [
        "1 epoch on 4 GPUs, 1.0 s per epoch",
        "failed: rank 1 failed",
    ]


def test_epoch_line_shows_data_wait_only_when_high() -> None:
    assert "  data wait 34%" in str(event_line(DATA_WAIT_EPOCH))
    assert "wait" not in str(event_line(make_timed_epoch()))
    event = json.loads(to_line(DATA_WAIT_EPOCH)) | {"data_wait": None}
    assert "wait" not in str(event_line(replace(DATA_WAIT_EPOCH, data_wait=event["data_wait"])))

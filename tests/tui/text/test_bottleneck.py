"""Where a user reads what limits a run: the run screen, the list of runs, the log, the summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.runs.event_lines import event_line, event_lines
from engine.runs.events import Event, RunFinished, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.history import history_from_events
from engine.runs.journal import to_line
from engine.runs.recorder import Recorder
from engine.runs.watcher import MAX_FULL_READ_BYTES, RunWatcher
from factories import make_gpu_run_started, make_run_folder, make_timed_epoch
from tui.cli.progress import PlainPrinter
from tui.text.run_progress import bottleneck_text
from tui.text.runs import RunRow, make_run_row

GPUS = make_gpu_run_started(flops=12.3e9, peak_tflops=3957.6)
WAITS = make_timed_epoch(data_wait=0.34)
ENDED = RunFinished(time=200.0, state="finished")


def row(root: Path, *events: Event) -> RunRow:
    return make_run_row(RunWatcher(make_run_folder(root, "a", *events)))


def test_limit_line_fits_width(tmp_path: Path) -> None:
    waits = row(tmp_path, GPUS, WAITS)
    assert bottleneck_text(waits, 80).plain == (
        " waiting for data 34% of the time; try data.workers=4   data wait 34%   MFU 6%"
    )
    assert bottleneck_text(waits, 78).plain == " waiting for data 34% of the time; try data.workers=4"
    assert bottleneck_text(waits, 30).plain == " waiting for data 34% of the…"
    assert bottleneck_text(replace(waits, verdict=None), 80).plain == " data wait 34%   MFU 6%"
    assert bottleneck_text(replace(waits, verdict=None, data_wait=None, mfu=None), 80).plain == ""


def test_bottleneck_message_fits_80_columns_or_starts_with_advice() -> None:
    for events in (
        [GPUS, make_timed_epoch()],
        [make_gpu_run_started(devices=["cpu"]), make_timed_epoch()],
        [GPUS, WAITS],
        [replace(GPUS, least_step=0.01), make_timed_epoch()],
    ):
        verdict = history_from_events(events).bottleneck
        assert verdict is not None
        assert len(verdict.message) <= 78
    limited = history_from_events([make_gpu_run_started(workers=8), WAITS]).bottleneck
    assert limited is not None
    assert "try smaller images" in limited.message[:78]


def test_run_row_before_first_epoch_uses_data_wait_of_latest_steps(tmp_path: Path) -> None:
    step = StepEvent(time=1.0, step=5, epoch=1, losses=[1.0], lr=0.1, images_per_second=9.0, data_wait=0.2)
    found = row(tmp_path, GPUS, step)
    assert (found.data_wait, found.mfu, found.verdict) == (0.2, None, None)


def test_run_row_json_has_bottleneck(tmp_path: Path) -> None:
    values = row(tmp_path, GPUS, WAITS, ENDED).to_dict()
    assert (values["data_wait"], values["mfu"]) == (0.34, 0.0622)
    assert values["verdict"] == "waiting for data 34% of the time; try data.workers=4"


def test_run_row_of_long_journal_takes_bottleneck_from_summary(tmp_path: Path) -> None:
    steps = [
        StepEvent(time=2.0, step=number, epoch=1, losses=[0.5] * 40, lr=0.1, images_per_second=9.0, data_wait=0.2)
        for number in range(MAX_FULL_READ_BYTES // 200)
    ]
    folder = make_run_folder(tmp_path, "a", GPUS, *steps, WAITS)
    folder.summary.write_text(json.dumps({"verdict": {"kind": "slowed down", "message": "GPU-0 since 14:05"}}))
    assert make_run_row(RunWatcher(folder)).verdict == "GPU-0 since 14:05"
    folder.summary.write_text(json.dumps({"verdict": ["of another shape"]}))
    assert make_run_row(RunWatcher(folder)).verdict is None


def test_recorder_ends_summary_and_log_with_bottleneck(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    recorder = Recorder(folder, Config(), lambda _: None)
    for event in (GPUS, WAITS, ENDED):
        recorder.record(event)
    recorder.close()
    summary = json.loads(folder.summary.read_text())
    message = "waiting for data 34% of the time; try data.workers=4"
    assert summary["verdict"] == {"kind": "waiting for data", "message": message}
    assert (summary["data_wait"], summary["mfu"]) == (0.34, 0.0622)
    told = [line[21:] for line in folder.log.read_text().splitlines()]
    assert told[-2:] == [f"{message} (data wait 34%, MFU 6%)", "finished"]


def test_plain_lines_end_with_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    hear = PlainPrinter()
    for event in (make_gpu_run_started(devices=["cpu"], flops=float("nan")), make_timed_epoch(), ENDED):
        hear(event)
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        "CPU-bound: a GPU, more cores or a smaller model would help (data wait 1%)",
        "finished",
    ]


def test_lines_of_failed_run_omit_bottleneck() -> None:
    failed = RunFinished(time=200.0, state="failed", message="rank 1 failed")
    assert event_lines(failed, history_from_events([GPUS, WAITS, failed])) == ["failed: rank 1 failed"]


def test_epoch_line_shows_data_wait_only_when_high() -> None:
    assert "  data wait 34%" in str(event_line(WAITS))
    assert "wait" not in str(event_line(make_timed_epoch()))
    read = json.loads(to_line(WAITS)) | {"data_wait": None}
    assert "wait" not in str(event_line(replace(WAITS, data_wait=read["data_wait"])))

"""The bottleneck message on the run screen, in the run list, the log and summary.json."""

from __future__ import annotations

import json
from pathlib import Path

from engine.runs.event_lines import event_line, event_lines
from engine.runs.events import Event, RunFinished
from engine.runs.history import history_from_events
from engine.runs.journal import to_line
from engine.runs.run_row import RunRow
from support.replace import replace
from support.runs.factories import make_gpu_run_started, make_run_folder, make_timed_epoch, row_of, with_fields
from tui.screens.run_progress import bottleneck_text

GPU_RUN = make_gpu_run_started(flops=12.3e9, peak_tflops=3957.6)
DATA_WAIT_EPOCH = make_timed_epoch(data_wait=0.34)


def row(root: Path, *events: Event) -> RunRow:
    return row_of(make_run_folder(root, "a", *events))


def test_bottleneck_text_fits_width(tmp_path: Path) -> None:
    run_row = row(tmp_path, GPU_RUN, DATA_WAIT_EPOCH)._replace(state="running")
    assert bottleneck_text(run_row, 80).plain == (
        " waiting for data 34% of the time; try data.workers=4    data wait 34%   MFU 6%"
    )
    assert bottleneck_text(run_row, 78).plain == " waiting for data 34% of the time; try data.workers=4"
    assert bottleneck_text(run_row, 30).plain == " waiting for data 34% of the…"
    assert bottleneck_text(with_fields(run_row, bottleneck=None), 80).plain == " data wait 34%   MFU 6%"
    assert bottleneck_text(with_fields(run_row, bottleneck=None, data_wait=None, mfu=None), 80).plain == ""


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

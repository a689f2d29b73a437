"""The preview of a run: what is read of its folder, and the lines of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.runs import journal as journal_module
from engine.runs import record_completion
from engine.runs.events import RunContinued, RunFinished, RunPaused
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.run_record import NO_RECORD, read_run_record
from engine.runs.run_row import RunRow
from support.runs.factories import make_row
from tui.demo.server import FINISHED_RUN, recorded_events
from tui.pollers.preview import PreviewReader
from tui.tables import styled
from tui.tables.config import config_changes
from tui.tables.preview import figure_lines
from tui.tables.runs import fit_monitor_list, monitor_line

ROW = make_row("a-run", "finished", epochs=6, total_epochs=6, best_val_accuracy=0.9376)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished run."""
    events = recorded_events(FINISHED_RUN, 1_760_000_000.0)
    (tmp_path / "events.jsonl").write_text("".join(to_line(event) + "\n" for event in events))
    (tmp_path / "config.yaml").write_text("optim: {lr: 0.2}\nrun: {epochs: 6, name: a-run}\n")
    return RunFolder(tmp_path)


def test_preview_reader_returns_figures_and_curves_per_epoch(folder: RunFolder) -> None:
    preview = PreviewReader(folder).poll()
    assert preview.record.values.get("best_val_accuracy") == pytest.approx(0.9376, abs=1e-4)
    assert [len(curve.series.y) for curve in preview.curves["loss"]] == [6, 6]
    assert preview.windows["loss"].high == 6
    assert [change.key for change in preview.changes] == ["run.epochs", "optim.lr"]


def test_preview_reader_returns_same_object_until_run_changes(folder: RunFolder) -> None:
    reader = PreviewReader(folder)
    first = reader.poll()
    assert reader.poll() is first
    with folder.journal.open("a") as journal:
        journal.write(to_line(RunFinished(state="stopped", message="on request")) + "\n")
    assert reader.poll().record.message == "on request"


def test_preview_reader_skips_steps_of_long_journal(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    *earlier, last = folder.journal.read_text().splitlines()
    end = json.loads(last)["time"]
    pause = [RunPaused(time=end, step=1, epoch=6), RunContinued(time=end + 3600, step=1, epoch=6)]
    lines = [*earlier, *map(to_line, pause), to_line(RunFinished(time=end + 3601, state="finished", message="x" * 300))]
    folder.journal.write_text("\n".join(lines) + "\n")
    whole = PreviewReader(folder).poll()
    assert whole.record.seconds < 3600
    monkeypatch.setattr(journal_module, "TAIL_BYTES", 300)
    reader = PreviewReader(folder)
    preview = reader.poll()
    assert preview.record == whole.record
    for chart, curves in preview.curves.items():
        for curve, other in zip(curves, whole.curves[chart], strict=True):
            np.testing.assert_array_equal(curve.series.y, other.series.y)
    with folder.journal.open("a") as journal:
        journal.write(to_line(RunFinished(state="failed", message="out of memory")) + "\n")
    assert reader.poll().record.state == "failed"


def test_preview_reader_takes_figures_from_record_and_completes_that_of_a_crashed_run(folder: RunFolder) -> None:
    folder.lock.touch()
    folder.summary.write_text('{"format": 1, "state": "finished", "started_at": 1, "best_val_accuracy": 0.5}')
    reader = PreviewReader(folder)
    assert reader.poll().record.values.get("best_val_accuracy") == 0.5
    *lines, _ = folder.journal.read_text().splitlines()
    folder.summary.write_text('{"format": 1, "state": "running", "started_at": 1, "best_val_accuracy": 0.6}')
    folder.journal.write_text("\n".join(lines) + "\n")
    record = reader.poll().record
    assert record.values.get("best_val_accuracy") == pytest.approx(0.9376, abs=1e-4)
    assert read_run_record(folder) == record


def test_preview_of_foreign_run_does_not_read_its_long_journal(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.chmod(0o777)
    monkeypatch.setattr(record_completion, "MAX_LISTED_JOURNAL_BYTES", 1000)
    assert PreviewReader(folder).poll().record == NO_RECORD


def test_preview_reader_shows_step_losses_during_first_epoch(folder: RunFolder) -> None:
    lines = folder.journal.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["type"] not in ("epoch", "run_finished")]
    folder.journal.write_text("\n".join(kept) + "\n")
    preview = PreviewReader(folder).poll()
    steps = [json.loads(line) for line in kept if json.loads(line)["type"] == "step"]
    assert len(preview.curves["loss"][0].series.y) == steps[-1]["step"]


@pytest.mark.parametrize("config", [{}, {"run": 3}, {"run.unknown": 1}])
def test_config_changes_ignores_what_is_no_config(config: dict[str, object]) -> None:
    assert config_changes(config) == ()


def test_figure_lines_show_results_and_hardware(folder: RunFolder) -> None:
    preview = PreviewReader(folder).poll()
    record = preview.record
    text = "\n".join(line.plain for line in figure_lines(ROW, preview, 100))
    assert "best val acc  0.9376   best epoch" in text
    assert f"global batch {record.values.get('global_batch')}" in text
    assert record.host in text


def monitor_text(row: RunRow, *, marked: bool = False) -> str:
    return styled(monitor_line(fit_monitor_list([row], 8, 80, lambda _: marked), row)).plain


def test_live_run_that_cannot_record_says_so_in_list_and_preview() -> None:
    message = "no news for 12s: the disk is full; the run goes on, and stop works"
    row = make_row("a-run", "running", message=message)
    assert monitor_text(row) == f"● a-run     {message}"
    assert f"reason        {message}" in [line.plain.strip() for line in figure_lines(row, None, 100)]


def test_line_of_live_sweep_counts_its_trials_and_shows_the_best_accuracy() -> None:
    row = make_row("night", "running", best_val_accuracy=0.95, message="2 running, 5 finished", trials=7)
    assert monitor_text(row) == "●▸night     2 running, 5 finished  best val acc 0.9500"
    assert monitor_text(row, marked=True).startswith("●◆night ")

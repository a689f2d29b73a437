"""The trials of a sweep: the same values under the same headings in the command and on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.jobs.sweeps.status import SweepReader, SweepStatus
from engine.report.table import line_text
from support.runs.sweeps import make_finished_trials
from tui.screens.tables.sweeps import param_table, status_lines, sweep_lines, trial_table


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> SweepStatus:
    folder, _ = make_finished_trials(Path(tmp_path_factory.mktemp("sweep")))
    return SweepReader(folder).poll()


def test_trial_has_same_values_in_command_and_on_screen(status: SweepStatus) -> None:
    lines = list(sweep_lines(status))
    header = next(line for line in lines if line.startswith("trial  run"))
    assert header.split() == [
        *(
            "trial",
            "run",
            "state",
            "best",
            "val",
            "acc",
            "epoch",
            "time",
            "optim.lr",
            "optim.name",
            "augment.crop_padding",
        )
    ]
    table = trial_table(status, 200)
    assert line_text(table.header("")).split() == [
        *("trial", "best", "val", "acc", "state", "epoch", "optim.lr", "optim.name", "augment.crop_padding")
    ]
    for row in status.by_value():
        shown = [word for word in line_text(table.line(row)).split() if word[0] not in "○✂✗◐■"]
        plain = next(line for line in lines if line.split()[1:2] == [row.run]).split()
        # Without the name of the run and the time.
        assert [plain[0], plain[3], plain[2], plain[4], *plain[6:]] == shown


@pytest.mark.parametrize("width", [24, 60, 250])
def test_narrow_sweep_tables_keep_trials_and_values(status: SweepStatus, width: int) -> None:
    assert {"trial", "value"} <= {column.key for column in trial_table(status, width).columns}
    params = {column.key for column in param_table(status, status.trials[3], width).columns}
    assert "trial" in params and (width < 60 or {"share", "bar", "best"} <= params)


def test_bars_are_sorted_as_the_values(status: SweepStatus) -> None:
    table = trial_table(status, 120)
    bars = [line_text(table.line(row)).count("■") for row in status.by_value() if row.state == "complete"]
    assert bars == sorted(bars, reverse=True) and bars[0] == max(bars) > bars[-1] >= 1


def test_status_names_the_best_trial_and_the_keys_that_go_on(status: SweepStatus) -> None:
    text = " ".join(" ".join(line.plain for line in status_lines(status)).split())
    assert "best val acc 0.9500 in trial 2" in text
    assert "a trains it longer" in text and "not running, u resumes it" in text

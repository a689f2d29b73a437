"""The trials of a sweep: the same values under the same headings in the command and on the screen, at each width."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.show.table import line_text, line_width
from engine.sweeps.status import SweepReader, SweepStatus
from support.runs.sweeps import make_finished_trials
from tui.tables.sweeps import sweep_lines, trial_table


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
        *("trial", "state", "best", "val", "acc", "epoch", "optim.lr", "optim.name", "augment.crop_padding")
    ]
    for row in status.by_value():
        shown = [word for word in line_text(table.line(row)).split() if "■" not in word[:2] and word not in "○✂✗"]
        plain = next(line for line in lines if line.split()[1:2] == [row.run]).split()
        # Without the name of the run and the time.
        assert [plain[0], *plain[2:5], *plain[6:]] == shown


@pytest.mark.parametrize("width", [20, 57, 117])
def test_sweep_tables_fit_width(status: SweepStatus, width: int) -> None:
    table = trial_table(status, width)
    assert max(line_width(line) for line in (table.header(""), *map(table.line, status.trials))) <= width
    if width >= 57:
        assert {"trial", "state", "value", "epoch", "optim.lr"} <= {column.key for column in table.columns}

"""The trials of a sweep as one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runs.folder import RunFolder
from engine.runs.run_row import RunRow
from engine.runs.trials import fold_trials
from support.runs.factories import make_row


def make_trial(number: int, accuracy: float | None = None, state: str = "finished", message: str = "") -> RunRow:
    name = f"s-{number:03d}"
    started = 100.0 * number
    return make_row(
        name, state, f"/r/{name}", message=message, sweep="s", best_val_accuracy=accuracy, started_at=started,
        seconds=10,
    )  # fmt: skip


OTHER = make_row("a", "finished", "/r/a", best_val_accuracy=0.5)
TRIALS = [make_trial(2, 0.8), make_trial(1, 0.9), make_trial(0)]


def names(rows: list[RunRow]) -> list[str]:
    return [row.name for row in rows]


def test_fold_trials_makes_one_row_in_the_place_of_the_first_trial() -> None:
    rows = [TRIALS[0], OTHER, *TRIALS[1:]]
    assert names(fold_trials(rows)) == ["s", "a"]
    assert names(fold_trials(rows, {"s"})) == ["s", "s-002", "s-001", "s-000", "a"]
    assert names(fold_trials([OTHER, TRIALS[1]])) == ["a", "s-001"]


def test_sweep_row_has_figures_of_best_and_age_of_newest_trial() -> None:
    row = fold_trials(TRIALS)[0]
    assert (row.trials, row.folder, row.message) == (3, "/r/s", "3 finished")
    assert row.record.values["best_val_accuracy"] == 0.9
    assert (row.record.started_at, row.record.seconds) == (200.0, 30.0)


@pytest.mark.parametrize(
    ("states", "state", "message"),
    [
        (("finished", "running", "waiting"), "running", "1 finished, 1 running, 1 waiting"),
        (("failed", "waiting", "finished"), "waiting", "1 failed, 1 waiting, 1 finished"),
        (("failed", "finished"), "finished", "1 failed, 1 finished"),
        (("failed", "failed"), "failed", "2 failed: out of memory"),
    ],
)
def test_sweep_row_has_state_of_its_trials(states: tuple[str, ...], state: str, message: str) -> None:
    trials = [make_trial(number, state=name, message="out of memory") for number, name in enumerate(states)]
    row = fold_trials(trials)[0]
    assert (row.state, row.message) == (state, message)


def test_run_is_trial_only_beside_the_folder_of_its_sweep(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "s-007").sweep == ""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.yaml").touch()
    assert [RunFolder(tmp_path / name).sweep for name in ("s-007", "s-07", "t-007", "s")] == ["s", "", "", ""]

"""What the user calls the metrics of a folder, and over which one they are plotted."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest

from engine.base.files import state_folder
from engine.runs.curves import CurveReader
from engine.runs.metric_rules import RULES_FILE, FolderRules, read_rules, write_rules
from engine.watch.folders import find_runs
from engine.watch.points import Point, Points
from engine.watch.reading import Reading
from engine.watch.renaming import RenamedLog, Renaming


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def renamed(renaming: Renaming, *readings: Reading) -> list[Reading]:
    log = RenamedLog(renaming)
    for reading in readings:
        log.apply(reading)
    return list(readings)


def test_rules_are_kept_for_their_folder_in_a_private_file(tmp_path: Path) -> None:
    rules = FolderRules(folder=str(tmp_path / "a"), names=(("lr", ""),), x="tokens")
    write_rules(rules)
    write_rules(FolderRules(folder=str(tmp_path / "b"), x="epochs"))
    assert read_rules(tmp_path / "a") == rules and read_rules(tmp_path / "b").x == "epochs"
    assert stat.S_IMODE((state_folder() / RULES_FILE).stat().st_mode) == 0o600


LOSS = Point("loss", 1, 3)
BY_TOKENS = [Point("tokens", 1, 1000), LOSS, Point("tokens", 2, 2000), Point("loss", 2, 2), Point("acc", 3, 1)]


@pytest.mark.parametrize(
    ("rules", "points", "expected"),
    [
        (
            Renaming({"loss": "train/loss", "lr": ""}),
            [LOSS, Point("lr", 1, 0.1), Point("acc", 1, 0.5)],
            [Point("train/loss", 1, 3), Point("acc", 1, 0.5)],
        ),
        (Renaming(x="tokens"), BY_TOKENS, [Point("loss", 1000, 3), Point("loss", 2000, 2)]),
        (Renaming(x="tokens"), [LOSS], [LOSS]),
    ],
    ids=["renamed or hidden", "over the chosen metric", "without the chosen metric"],
)
def test_points_follow_the_rules(rules: Renaming, points: list[Point], expected: list[Point]) -> None:
    assert renamed(rules, Reading(Points(points)))[0].points == expected


def test_restart_voids_the_points_from_the_x_of_its_step() -> None:
    first = Reading(Points([Point("tokens", step, step * 1000) for step in (1, 2, 3)]))
    rules = Renaming(x="tokens")
    *_, again = renamed(rules, first, Reading(Points([Point("tokens", 2, 2500)]), drop_from=2))
    assert again.drop_from == 2000
    *_, replaced = renamed(rules, Reading(drop_from=-math.inf))
    assert replaced.drop_from == -math.inf


def test_rules_of_a_folder_hold_for_the_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.csv").write_text("step,loss\n0,3\n1,2\n")
    [run] = find_runs(tmp_path / "runs").runs
    write_rules(FolderRules(folder=str(tmp_path / "runs"), names=(("loss", "cost"),)))
    reader = CurveReader(run)
    reader.read()
    assert reader.curves.names == ["cost"]

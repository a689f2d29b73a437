"""The study of a sweep: proposals do not depend on restarts, a torn journal is repaired, and nothing is unpickled."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path

import pytest

from engine.base.codec import replace
from engine.jobs.sweeps import Pruner
from engine.jobs.sweeps.best import best_command, longer_arguments
from engine.jobs.sweeps.folder import find_sweep
from engine.jobs.sweeps.settings import SweepSettings
from engine.jobs.sweeps.space import Value
from engine.jobs.sweeps.status import SweepReader
from engine.jobs.sweeps.study import SweepStudy, open_study
from support.messages import raises_problem
from support.runs.sweeps import make_sweep

SETTINGS = SweepSettings(space={"optim.lr": "log:1e-3..1", "optim.name": "sgd,adamw"}, trials=30)


def run_trials(study: SweepStudy, count: int) -> list[dict[str, Value]]:
    """Add trials whose value depends on the learning rate, and return their parameters."""
    proposed = []
    for _ in range(count):
        params = study.propose()
        assert params is not None
        number = study.add(params, {})
        study.end(number, "COMPLETE", 1 - abs(float(params["optim.lr"]) - 0.1))
        proposed.append(params)
    return proposed


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_proposals_are_the_same_however_often_the_study_is_reopened(tmp_path: Path, sampler: str) -> None:
    settings = SweepSettings(space=SETTINGS.space, sampler=sampler)  # type: ignore[arg-type]
    count = 10 if sampler == "grid" else 13
    whole = run_trials(open_study(make_sweep(tmp_path, settings), settings, create=True), count)
    folder = make_sweep(tmp_path, settings, "parts")
    parts = [run_trials(open_study(folder, settings, create=True), 1)[0] for _ in range(count)]
    assert whole == parts
    assert len({tuple(point.items()) for point in parts}) == count
    if sampler == "grid":
        assert open_study(folder, settings, create=True).propose() is None


def test_incomplete_last_line_of_the_journal_is_removed(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, SETTINGS)
    run_trials(open_study(folder, SETTINGS, create=True), 2)
    intact = folder.journal.read_bytes()
    with folder.journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    assert len(SweepReader(folder).poll().trials) == 2
    study = open_study(folder, SETTINGS, create=True)
    assert folder.journal.read_bytes() == intact
    run_trials(study, 1)
    assert len(SweepReader(folder).poll().trials) == 3


def test_status_has_order_best_and_reasons(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, SETTINGS)
    reader = SweepReader(folder)
    assert reader.poll().trials == ()
    study = open_study(folder, SETTINGS, create=True)
    run_trials(study, 12)
    failed = study.add({"optim.lr": 0.5, "optim.name": "sgd"}, {})
    study.end(failed, "FAIL", reason="no GPU", code="no-gpu")
    pruned = study.add({"optim.lr": 0.9, "optim.name": "sgd"}, {})
    study.report(pruned, 1, 0.25)
    study.report(pruned, 1, 0.75)
    study.end(pruned, "PRUNED", reason="pruned after epoch 1", code="stopped")
    running = study.add({"optim.lr": 0.9, "optim.name": "adamw"}, {"preset": True})
    study.report(running, 2, float("nan"))
    status = reader.poll()
    ordered = status.by_value()
    assert [row.number for row in ordered[12:]] == [running, pruned, failed]
    assert status.best == ordered[0]
    assert status.best is not None and status.best.value == max(row.value or 0 for row in status.trials[:12])
    assert dict(status.counts) == {"complete": 12, "failed": 1, "pruned": 1, "stopped": 1}
    assert (status.trials[failed].reason, status.trials[failed].code) == ("no GPU", "no-gpu")
    assert (status.trials[pruned].value, status.trials[running].value) == (0.25, None)
    assert status.to_dict()["best"]["run"] == f"s-{status.best.number:03d}"


def test_best_of_equal_trials_has_lower_loss_then_lower_number(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, SETTINGS)
    study = open_study(folder, SETTINGS, create=True)
    for value, val_loss in ((0.9, 0.5), (0.9, None), (0.9, 0.1), (0.9, 0.1), (0.8, 0.01)):
        number = study.add({"optim.lr": 0.1, "optim.name": "sgd"}, {})
        study.end(number, "COMPLETE", value, val_loss=val_loss)
    status, best = SweepReader(folder).poll(), study.best()
    assert status.best is not None and best is not None
    assert status.best.number == best.number == 2
    assert [row.number for row in status.by_value()] == [2, 3, 0, 1, 4]


def test_best_config_is_trained_for_five_times_the_epochs_of_its_trial(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, SETTINGS)
    folder.config.write_text("run: {epochs: 3}\n")
    command = f"`gputrain run {folder.best} --epochs 15 --name s-best`"
    assert best_command(folder, SETTINGS, {"optim.lr": 0.1}) == f"train it longer with {command}"
    assert "--epochs 40 " in best_command(folder, SETTINGS, {"run.epochs": 8})


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()) + b"\n", b'{"op_code": 99}\n{}\n', b"[]\n{}\n"])
def test_journal_that_is_none_is_refused_and_executes_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_sweep(tmp_path, SETTINGS)
    folder.journal.write_bytes(content)
    with raises_problem("wrong-format", str(folder.journal)):
        SweepReader(folder).poll()
    assert not (tmp_path / "executed").exists()


def test_foreign_sweeps_are_refused_unless_their_owner_is_trusted(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, SETTINGS)
    open_study(folder, SETTINGS, create=True)
    folder.journal.chmod(0o666)
    with raises_problem("foreign-writable", str(folder.path), "optuna.jsonl", "--trust-owner"):
        find_sweep(tmp_path, "s")
    assert find_sweep(tmp_path, "s", trust_owner=True) == folder
    folder.journal.rename(tmp_path / "elsewhere")
    folder.journal.symlink_to(tmp_path / "elsewhere")
    with raises_problem("is-link", str(folder.path), "optuna.jsonl"):
        find_sweep(tmp_path, "s", trust_owner=True)


def test_asha_has_two_rungs_before_the_last_step(tmp_path: Path) -> None:
    settings = replace(SETTINGS, pruner="asha")
    study = open_study(make_sweep(tmp_path, settings), settings, create=True)
    for value in (0.5, 0.1):
        number, decisions = study.add({"optim.lr": 0.1, "optim.name": "sgd"}, {}), list[bool]()
        for epoch in range(1, 18):
            study.report(number, epoch, value * (1 if epoch < 6 else 6))
            decisions.append(study.should_prune(number, 17))
    assert decisions.index(True) + 1 == 2
    assert study.trial(0).system_attrs.keys() == {"completed_rung_0", "completed_rung_1"}


def add_finished_trials(study: SweepStudy, count: int) -> None:
    """Add complete trials of nine epochs whose value is 0.5 at each."""
    for _ in range(count):
        number = study.add({"optim.lr": 0.1, "optim.name": "sgd"}, {})
        for epoch in range(1, 10):
            study.report(number, epoch, 0.5)
            study.should_prune(number, 9)
        study.end(number, "COMPLETE", 0.5)


@pytest.mark.parametrize(
    ("pruner", "finished", "epoch", "value", "is_pruned"),
    [
        # The default.
        (None, 4, 8, 0.1, False),
        (None, 5, 2, 0.1, False),
        (None, 5, 3, 0.1, True),
        (None, 5, 3, 0.5, False),
        ("asha", 1, 1, 0.1, True),
        ("asha", 1, 1, 0.5, False),
        ("none", 5, 8, 0.1, False),
    ],
)
def test_pruner_stops_poor_trial_after_a_third_and_five_finished_trials(
    tmp_path: Path, pruner: Pruner | None, finished: int, epoch: int, value: float, *, is_pruned: bool
) -> None:
    settings = SETTINGS if pruner is None else replace(SETTINGS, pruner=pruner)
    study = open_study(make_sweep(tmp_path, settings), settings, create=True)
    add_finished_trials(study, finished)
    number = study.add({"optim.lr": 0.9, "optim.name": "sgd"}, {})
    decisions = list[bool]()
    for each in range(1, epoch + 1):
        study.report(number, each, value)
        # The length of the first trial of a script is unknown.
        assert not study.should_prune(number, 0)
        decisions.append(study.should_prune(number, 9))
    assert decisions == [False] * (epoch - 1) + [is_pruned]


def test_importances_name_the_key_that_decides_and_need_some_trials(tmp_path: Path) -> None:
    settings = SweepSettings(config="digits", space={"optim.lr": "log:1e-3..1", "run.seed": "int:0..9"})
    study = open_study(make_sweep(tmp_path, settings), settings, create=True)
    assert study.importances() == {}
    for number in range(20):
        lr = 10 ** (-3 * (number % 7) / 6)
        study.add({"optim.lr": lr, "run.seed": number * 3 % 10}, {})
        study.end(number, "COMPLETE", 1 - abs(math.log10(lr) + 1))
    importances = study.importances()
    assert sum(importances.values()) == pytest.approx(1)
    assert importances["optim.lr"] > 0.6 > importances["run.seed"]


def test_importances_of_equal_results_are_no_error_and_warn_of_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    settings = SweepSettings(config="digits", space={"optim.lr": "log:1e-3..1", "optim.name": "sgd,adamw"})
    study = open_study(make_sweep(tmp_path, settings), settings, create=True)
    for number in range(8):
        study.add({"optim.name": "sgd"} if number == 0 else {"optim.lr": 0.1, "optim.name": "sgd"}, {})
        study.end(number, "COMPLETE", 0.5)
    assert all(0 <= share <= 1 for share in study.importances().values())
    assert recwarn.list == []


def test_longer_run_of_the_best_config_has_no_name_that_is_taken(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path)
    assert longer_arguments(folder, {})[-2:] == ["--name", "s-best"]
    (tmp_path / "s-best").mkdir()
    assert "--name" not in longer_arguments(folder, {})

"""The controller of a sweep, with stand-ins for its trials: a kill between any two steps loses and repeats nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.base.exit_codes import ExitCode
from engine.config.code_trust import CodeTrust
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import parse_yaml
from engine.jobs.sweeps import controller as controller_module
from engine.jobs.sweeps.controller import Controller, Emit
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.plan import SweepPlan, plan_sweep
from engine.jobs.sweeps.settings import SweepSettings
from engine.jobs.sweeps.start import create_sweep, load_sweep, run_sweep
from engine.jobs.sweeps.status import SweepReader, SweepStatus
from engine.jobs.sweeps.study import SweepStudy, open_study
from engine.jobs.sweeps.trial import Trial
from engine.runs.control import send_request
from support.gputrain_command import ROOT, wait_for
from support.messages import raises_problem, says

COMMAND = [sys.executable, str(ROOT / "tests" / "support" / "runs" / "fake_trial.py")]


class KilledError(Exception):
    """Stands for a SIGKILL of the controller."""


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(controller_module, "TICK_SECONDS", 0.02)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    (tmp_path / "behavior.json").write_text("{}")


def make_sweep(root: Path, **settings: Any) -> SweepFolder:
    defaults = {"config": "digits", "space": {"optim.lr": "0.05..0.5"}, "fixed": {"device.gpus": "cpu"}}
    plan = plan_sweep(SweepSettings(**defaults | {"trials": 3} | settings), root, trust=CodeTrust())
    folder = SweepFolder(root / "s")
    create_sweep(folder, plan)
    return folder


def behave(root: Path, **behavior: str) -> None:
    names = {name.replace("_", "-"): what for name, what in behavior.items()}
    (root / "behavior.json").write_text(json.dumps(names))


def run(folder: SweepFolder, lines: list[str] | None = None) -> ExitCode:
    """Run a controller without its signal handlers."""
    plan: SweepPlan = load_sweep(folder, {})
    received: list[str] = [] if lines is None else lines
    with folder.controller_lock():
        study = open_study(folder, plan.settings, create=True)
        return Controller(folder, plan, study, COMMAND, [], received.append).run()


def status(folder: SweepFolder) -> SweepStatus:
    return SweepReader(folder).poll()


def starts(root: Path) -> list[str]:
    path = root / "starts.txt"
    return sorted(path.read_text().split()) if path.exists() else []


def test_sweep_runs_all_trials_and_stores_the_best_config(tmp_path: Path) -> None:
    folder, lines = make_sweep(tmp_path, parallel=2), list[str]()
    assert run(folder, lines) is ExitCode.FINISHED
    shown = status(folder)
    assert [row.state for row in shown.trials] == ["complete"] * 3
    assert (shown.trials[0].preset, shown.trials[0].params, shown.trials[0].value) == (True, {"optim.lr": 0.1}, 1.0)
    assert shown.best == shown.trials[0]
    assert starts(tmp_path) == [f"s-00{number}" for number in range(3)]
    assert "# Trial 0 of s: best_val_accuracy 1.0" in folder.best.read_text()
    assert any("`gputrain run " in line for line in lines)
    best = resolve_config(str(folder.best)).config
    assert best == resolve_config(str(folder.config)).config
    assert parse_yaml(folder.best.read_text()) == as_stored(best, only_changed=True)
    # Nothing is left to do.
    assert run(folder) is ExitCode.FINISHED
    assert len(starts(tmp_path)) == 3


def test_controller_killed_between_any_two_steps_loses_and_repeats_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_sweep(tmp_path, parallel=2)
    journals: list[Path] = []

    def killing(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            step(*arguments, **named)
            if isinstance(arguments[0], Trial):
                journals.append(arguments[0].folder.journal)
            raise KilledError

        return call

    for owner, name in ((SweepStudy, "add"), (SweepStudy, "report"), (SweepStudy, "end"), (Trial, "start")):
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
    sessions, outcome = 0, None
    while outcome is None:
        sessions += 1
        try:
            outcome = run(folder)
        except KilledError:
            assert sessions < 40
            # Before that, a controller starts the trial once more, which is refused but takes its time.
            wait_for(lambda: all(journal.exists() for journal in journals), "the beginning of the trials")
    shown = status(folder)
    assert sessions > 8
    assert [row.state for row in shown.trials] == ["complete"] * 3
    assert [row.epoch for row in shown.trials] == [2] * 3
    for row in shown.trials:
        events = [json.loads(line) for line in (tmp_path / row.run / "events.jsonl").read_text().splitlines()]
        assert [event["epoch"] for event in events if event["type"] == "epoch"] == [1, 2]


def test_sweep_searches_the_best_value_of_an_own_metric_in_its_direction(tmp_path: Path) -> None:
    folder, lines = make_sweep(tmp_path, metric="metrics.val/distance=low"), list[str]()
    assert run(folder, lines) is ExitCode.FINISHED
    shown = status(folder)
    values = [row.value for row in shown.by_value() if row.value is not None]
    assert len(values) == 3 and values == sorted(values)
    assert shown.best is not None and shown.best.value == values[0]
    assert any("metrics.val/distance 0" in line for line in lines)


def test_failed_crashed_and_nonfinite_trials_are_counted_with_their_reason(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, trials=5, parallel=1)
    behave(tmp_path, s_000="fail", s_001="nan", s_002="crash", s_004="refuse")
    lines: list[str] = []
    assert run(folder, lines) is ExitCode.FINISHED
    shown = status(folder)
    assert dict(shown.counts) == {"complete": 1, "failed": 4}
    failures = [row for row in shown.trials if row.reason]
    assert [row.code for row in failures] == ["run-failed", "non-finite", "run-failed", "run-failed"]
    failed, nonfinite, crashed, refused = (row.reason for row in failures)
    assert failed == "the loss of RUN is not finite"
    assert crashed == "crashed"
    assert says(nonfinite, "non-finite", "val_accuracy")
    assert refused == "error: data.path: does not exist"
    assert starts(tmp_path).count("s-002") == 1
    assert any(line.startswith("trial 4 ") and line.endswith(refused) for line in lines)


def test_sweep_ends_when_its_first_trials_fail_for_the_same_reason(tmp_path: Path) -> None:
    folder, lines = make_sweep(tmp_path, trials=9), list[str]()
    behave(tmp_path, **{f"s_00{number}": "fail" for number in range(9)})
    assert run(folder, lines) is ExitCode.FAILED
    assert status(folder).counts == {"failed": 3}
    assert any("the first 3 trials" in line for line in lines)


def test_stopped_sweep_continues_its_trials_and_a_trial_stopped_by_hand_is_pruned(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, parallel=2, trials=2, pruner="none")
    behave(tmp_path, s_000="wait", s_001="wait")
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith("trial 1 (s-001) started"):
            send_request(folder.control, "stop")

    plan = load_sweep(folder, {})
    with folder.controller_lock():
        study = open_study(folder, plan.settings, create=True)
        assert Controller(folder, plan, study, COMMAND, [], on_line).run() is ExitCode.STOPPED
    assert status(folder).counts == {"stopped": 2}
    assert any("`gputrain sweep resume s`" in line for line in lines)
    behave(tmp_path, s_001="wait")

    def stop_by_hand(line: str) -> None:
        if line.startswith("trial 0 finished"):
            # The trial may not have created its folder before the sweep was stopped.
            wait_for(folder.trial(1).path.is_dir, "the folder of trial 1")
            send_request(folder.trial(1).control, "stop")

    with folder.controller_lock():
        study = open_study(folder, plan.settings, create=True)
        assert Controller(folder, plan, study, COMMAND, [], stop_by_hand).run() is ExitCode.FINISHED
    shown = status(folder)
    assert [row.state for row in shown.trials] == ["complete", "pruned"]
    assert shown.trials[1].code == "stopped" and "user" in shown.trials[1].reason


def test_trial_that_a_signal_stops_goes_on(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, trials=2, pruner="none")
    behave(tmp_path, s_001="sigterm")
    plan = load_sweep(folder, {})
    with folder.controller_lock():
        study = open_study(folder, plan.settings, create=True)
        assert Controller(folder, plan, study, COMMAND, [], lambda _: None).run() is ExitCode.FINISHED
    assert [row.state for row in status(folder).trials] == ["complete", "complete"]


def test_pruned_trial_is_reported_with_its_value_at_that_epoch(tmp_path: Path) -> None:
    folder, lines = make_sweep(tmp_path, pruner="asha", trials=3), list[str]()
    # They have two epochs when the controller looks, and end when it asks them to.
    behave(tmp_path, s_001="wait", s_002="wait")
    assert run(folder, lines) is ExitCode.FINISHED
    trials = open_study(folder, load_sweep(folder, {}).settings).trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    for number in (1, 2):
        first, last = trials[number].intermediate_values.values()
        assert first < last
        assert f"trial {number} pruned after epoch 1: best_val_accuracy {first:.4g}" in lines


def run_task(folder: SweepFolder, task: str, emit: Emit = lambda _: None) -> ExitCode:
    """Run one job of an array."""
    plan = load_sweep(folder, {})
    study = open_study(folder, plan.settings, create=True)
    return Controller(folder, plan, study, COMMAND, [], emit, task=task).run()


def test_each_job_of_an_array_runs_one_trial(tmp_path: Path) -> None:
    folder, tasks = make_sweep(tmp_path, trials=4), [f"7_{number}" for number in range(4)]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(partial(run_task, folder), tasks)] == [ExitCode.FINISHED] * 4
    shown = status(folder)
    assert [row.state for row in shown.trials] == ["complete"] * 4
    assert len({row.params["optim.lr"] for row in shown.trials}) == 4
    # A requeued job that has nothing left to do takes no other trial.
    assert run_task(folder, "7_1") is ExitCode.FINISHED
    assert starts(tmp_path) == [f"s-00{number}" for number in range(4)]


def test_trial_continues_in_its_requeued_job_and_in_a_later_array(tmp_path: Path) -> None:
    folder, sessions = make_sweep(tmp_path, trials=2, pruner="none"), list[ExitCode]()
    behave(tmp_path, s_000="wait", s_001="wait")

    def stop_after_start(line: str) -> None:
        if line.startswith("trial") and ("started" in line or "continues" in line):
            send_request(folder.control, "stop")

    for task in ("7_0", "7_1", "7_1"):
        sessions.append(run_task(folder, task, stop_after_start))
    assert sessions == [ExitCode.STOPPED] * 3
    behave(tmp_path)
    assert [run_task(folder, task) for task in ("8_0", "8_1")] == [ExitCode.FINISHED] * 2
    assert [row.state for row in status(folder).trials] == ["complete", "complete"]


def test_second_controller_of_one_sweep_is_refused(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path)
    with (
        folder.controller_lock(),
        raises_problem("already-running", "s", "`gputrain sweep show s`"),
    ):
        run_sweep(folder, load_sweep(folder, {}), command=COMMAND, flags=[], emit=lambda _: None)

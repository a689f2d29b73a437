"""The sweep of a script: placeholders and their values, the metric and its direction, and the GPUs of its trials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config.code_trust import CodeTrust
from engine.jobs.command.spec import Program
from engine.jobs.sweeps.plan import SweepPlan, divide_gpus, fill_command, plan_script, trial_line
from engine.jobs.sweeps.settings import SweepSettings, typed_metric
from engine.jobs.sweeps.trial import match_rank
from engine.runs.metrics import Better
from support.messages import raises_problem


def command(*argv: str, **fields: Any) -> Program:
    place: dict[str, Any] = {"cwd": "/", "cwd_inode": Path("/").stat().st_ino, "environment": {"PATH": "/usr/bin:/bin"}}
    return Program(argv=argv, **place | fields)


def plan(root: Path, space: dict[str, str], *argv: str, **settings: Any) -> SweepPlan:
    values: dict[str, Any] = {
        "fixed": {"device.gpus": "cpu"},
        "metric": "metrics.acc=high",
        "command": "typed",
    } | settings
    typed = command(sys.executable, *argv, environment={"PATH": "/bin", "OUT": "{lr}"}, expanded=())
    return plan_script(SweepSettings(space=space, **values), typed, root, trust=CodeTrust())


def test_values_replace_placeholders_alone_and_inside_of_a_word(tmp_path: Path) -> None:
    planned = plan(tmp_path, {"lr": "log:1e-4..1e-1", "bs": "16,32"}, "--lr", "{lr}", "optim.lr={lr}", "b{bs}-{gpus}")
    assert planned.command is not None
    filled = fill_command(planned.command, {"lr": 1e-05, "bs": "16"})
    assert filled.argv[1:] == ("--lr", "1e-05", "optim.lr=1e-05", "b16-{gpus}")


def test_value_with_shell_characters_is_one_argument(tmp_path: Path) -> None:
    planned = plan(tmp_path, {"name": "a b; rm -rf $HOME,`id`"}, "--name", "{name}")
    assert planned.command is not None
    values = planned.settings.spaces()["name"].probes()
    assert [fill_command(planned.command, {"name": value}).argv[2] for value in values] == ["a b; rm -rf $HOME", "`id`"]
    assert trial_line(planned.settings, {"name": values[1]}).endswith("--name '`id`'")


def test_range_of_a_script_holds_integers_only_with_int(tmp_path: Path) -> None:
    spaces = plan(tmp_path, {"run.epochs": "1..3", "n": "int:1..3"}, "{run.epochs}", "{n}").settings.spaces()
    assert [type(space.probes()[0]) for space in spaces.values()] == [float, int]


@pytest.mark.parametrize(
    ("space", "words", "code", "location"),
    [
        ({"lr": "1,2", "bs": "1,2"}, ["{lr}"], "no-effect", "bs"),
        ({"lr": "1,2"}, ["{lr}", "{bs}"], "missing-value", "{bs}"),
        ({"gpus": "1,2"}, ["{gpus}"], "conflict", "gpus"),
        ({"a+b": "1,2"}, ["{a+b}"], "invalid-name", "a+b"),
        ({"lr": "1"}, ["{lr}"], "missing-value", ""),
    ],
)
def test_plan_refuses_parameters_and_placeholders_that_do_not_match(
    tmp_path: Path, space: dict[str, str], words: list[str], code: str, location: str
) -> None:
    with raises_problem(code, location):
        plan(tmp_path, space, *words)


def test_whole_grid_of_a_script_has_no_trial_of_a_config(tmp_path: Path) -> None:
    planned = plan(tmp_path, {"lr": "1,2", "bs": "3,4,5"}, "{lr}", "{bs}", sampler="grid", trials=1000)
    assert (planned.settings.trials, dict(planned.preset)) == (6, {})


def test_direction_of_a_metric_is_that_of_the_option_unless_the_registry_knows_another() -> None:
    assert typed_metric("--maximize", "val/acc", Better.HIGH, is_script=True) == "metrics.val/acc=high"
    assert typed_metric("--minimize", 'metrics."val f1"', Better.LOW, is_script=False) == '"metrics.val f1"=low'
    assert typed_metric("--minimize", "rmse", Better.LOW, is_script=False) == "metrics.rmse=low"
    assert typed_metric("--maximize", "accuracy", Better.HIGH, is_script=False) == "best_val_accuracy"
    with raises_problem("conflict", "--maximize", "--minimize val/loss"):
        typed_metric("--maximize", "val/loss", Better.HIGH, is_script=True)


@pytest.mark.parametrize("wanted", ["val/acc", "val_acc", "val_accuracy", "val acc", "best_val_accuracy"])
def test_metric_is_found_by_its_printed_name_its_key_and_its_label(wanted: str) -> None:
    ranks = {name: match_rank(wanted, name) for name in ("val/acc", "loss", "train/acc")}
    assert min(ranks, key=lambda name: ranks[name]) == "val/acc"
    assert ranks["loss"] == ranks["train/acc"] == max(ranks.values())


def test_listed_gpus_are_divided_among_parallel_trials() -> None:
    assert divide_gpus("0,1,2,3", 2) == ["0,1", "2,3"]
    assert divide_gpus("0,1,2,3", 3) == ["0", "1", "2"]
    assert divide_gpus("0,1", 1) == ["0,1"] and divide_gpus("free:2", 3) == ["free:2"]
    with raises_problem("out-of-range", "--parallel"):
        divide_gpus("0,1", 3)

"""The form without widgets: values, config, command and LR curve."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict
from engine.jobs.launch.request import RunRequest
from engine.runs.root import runs_root
from support.gputrain_command import Gputrain
from tui.cli.main import app
from tui.form.fields import completions, form_fields, optimizer_placeholders
from tui.form.flags import run_arguments
from tui.form.model import (
    Form,
    form_from_run,
    load_last_form,
    next_run_name,
    save_last_form,
    validate_form,
)

TYPED = {
    "device.ranks": "3",
    "run.epochs": "7",
    "run.name": "a-b",
    "optim.name": "adamw",
    "optim.betas": "[0.8, 0.99]",
    "schedule.name": "multistep",
    "schedule.milestones": "[2, 5]",
    "data.drop_last": "false",
    "data.workers": "2",
    "optim.weight_decay": "5e-4",
    "precision.amp": "bf16",
    "device.wait": "true",
}


@pytest.mark.parametrize("base", [None, "digits"])
def test_form_command_resolves_to_same_config(base: str | None, gputrain: Gputrain) -> None:
    form = Form(base, dict(TYPED))
    command = shlex.join(["gputrain", *form.arguments_for(form.config(), runs_root())])
    keys = [f"{key}={text}" for key, text in TYPED.items()]
    resolved = json.loads(gputrain("config", *([base] if base else []), *keys, "--json").stdout)["config"]
    assert resolved == as_dict(form.config())
    assert as_dict(config_of_run(shlex.split(command)[1:])) == resolved


def config_of_run(arguments: list[str]) -> Config:
    """Return the config that `gputrain run` resolves from these arguments."""
    configs: list[Config] = []

    def keep(request: RunRequest, **_: object) -> None:
        configs.append(request.config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tui.cli.train.run_headless", keep)
        app([*arguments, "--headless"], standalone_mode=False)
    return configs[0]


def test_next_run_name_skips_names_that_are_taken(tmp_path: Path) -> None:
    form = Form("digits")
    (tmp_path / "digits-1").mkdir()
    assert next_run_name(form, form.config(), tmp_path) == "digits-2"
    own = Form("digits", {"data.dataset": "folder", "data.path": "/x/flowers"})
    assert next_run_name(own, own.config(), tmp_path) == "flowers-1"
    nothing = Form(None)
    assert next_run_name(nothing, nothing.config(), tmp_path) == "digits-cnn-1"


def test_completions_list_names_that_begin_with_text_first() -> None:
    kinds = {info.key: info for info in form_fields()}

    def found(key: str, text: str) -> list[str]:
        return [completion.value for completion in completions(kinds[key], text)]

    names = ["adam", "adamw", "adagrad", "adadelta", "adamax", "adafactor", "nadam", "radam"]
    assert found("optim.name", "ada") == names
    assert found("model.name", "mine:build") == found("run.epochs", "1") == []
    assert found("optim.nesterov", "") == ["", "false", "true"]


def test_form_ignores_value_equal_to_base() -> None:
    form = Form("digits")
    form.set_value("optim.lr", "0.2")
    form.set_value("optim.lr", "0.1")
    assert form.arguments_for(form.config(), runs_root()) == ["run", "digits"]


def test_form_choices_are_remembered_without_name() -> None:
    assert load_last_form() == Form("digits")
    save_last_form(Form("digits", {"optim.lr": "0.3", "run.name": "a"}))
    assert load_last_form() == Form("digits", {"optim.lr": "0.3"})


def test_form_begins_without_values_that_are_refused() -> None:
    save_last_form(Form("digits", {"run.epochs": "0", "optim.lr": "0.3"}))
    assert load_last_form() == Form("digits", {"optim.lr": "0.3"})


def test_form_never_stores_url_that_was_typed_instead_of_reference() -> None:
    references = {"notify.urls": "[env:NTFY]", "optim.lr": "0.3"}
    save_last_form(Form("digits", references))
    assert load_last_form() == Form("digits", references)
    form = Form("digits", {"notify.urls": "slack://hunter2/b", "optim.lr": "0.3"})
    save_last_form(form)
    assert load_last_form() == Form("digits", {"optim.lr": "0.3"})
    problems = validate_form(form)[1]
    assert [problem.location for problem in problems] == ["notify.urls"]
    assert "hunter2" not in str(problems)
    with pytest.raises(UsageError) as error:
        form.config()
    assert "hunter2" not in str(error.value)


def test_form_drops_parameters_of_previous_optimizer() -> None:
    form = Form("digits", {"optim.momentum": "0.8", "optim.lr": "0.2"})
    form.set_value("optim.name", "adamw")
    assert form.overrides == {"optim.name": "adamw"}
    assert validate_form(form)[1] == []
    assert (form.values()["optim.lr"], optimizer_placeholders("adamw")["optim.lr"]) == ("", "0.001")
    assert form.config().optim.lr == 0.001


def test_form_of_run_picks_free_name(tmp_path: Path) -> None:
    for name in ("a-3", "a-4", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"run: {{name: {name}}}\noptim: {{lr: 0.7}}\n")
    again = form_from_run(tmp_path / "a-3" / "config.yaml")
    assert (again.config().run.name, again.config().optim.lr) == ("a-5", 0.7)
    assert form_from_run(tmp_path / "b" / "config.yaml").config().run.name == "b-2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("device.wait=true", ["--queue"]),
        ('queue.after=["a","b:any"]', ["--after", "a,b:any"]),
        ("data.workers=0", ["--workers", "0"]),
    ],
)
def test_run_arguments_resolve_to_the_config_with_flags(change: str, words: list[str]) -> None:
    before = resolve_config("digits").config
    after = resolve_config("digits", [change]).config
    assert run_arguments("digits", before, after) == ["run", "digits", *words]
    typed, expected = (
        CliRunner().invoke(app, ["config", "digits", "--json", *args]).stdout for args in (words, [change])
    )
    assert json.loads(typed) == json.loads(expected)

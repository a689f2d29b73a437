"""The form without widgets: values, config, command, LR curve and checks."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import Field
from typer.testing import CliRunner

from engine.config.loader import presets, resolve_config
from engine.config.rules import DEPENDS_ON
from engine.config.schema import Config, as_dict, fields
from engine.config.section import Section
from engine.gpus.current_use import find_current_use
from engine.gpus.snapshot import Reading, Snapshot
from engine.launch.preflight import RunRequest
from engine.optim.lr_schedule import lr_factor
from engine.utils.errors import Problem, UsageError
from support.gputrain_command import Gputrain, wait_for
from support.messages import has_problem, raises_problem
from support.replace import replace
from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from tui.cli.main import app
from tui.flags import run_arguments
from tui.form.checks import FormChecker
from tui.form.completions import Completer
from tui.form.fields import form_fields, form_sections, help_text, is_relevant
from tui.form.model import (
    Form,
    form_from_run,
    load_last_form,
    lr_curve,
    next_run_name,
    save_last_form,
    validate_form,
)
from tui.form.plan import plan_text
from tui.widgets.field_lines import LABEL_COLUMNS

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


@pytest.fixture(autouse=True)
def isolated_xdg_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.mark.parametrize("base", [None, "digits"])
def test_form_command_resolves_to_same_config(base: str | None, gputrain: Gputrain) -> None:
    form = Form(base, dict(TYPED))
    command = shlex.join(["gputrain", *form.arguments()])
    keys = [f"{key}={text}" for key, text in TYPED.items()]
    resolved = json.loads(gputrain("config", *([base] if base else []), *keys, "--json").stdout)
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


def test_form_has_described_field_for_every_key() -> None:
    infos = form_fields()
    assert {info.key for info in infos} | {"run.resume"} == {key for key, _ in fields()}
    assert all(info.description for info in infos)


def test_form_shows_new_config_keys_without_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProbeConfig(Section):
        every_steps: int = Field(5, description="Steps between probes. Used by tests.")
        kind: Literal["fast", "full"] = Field("fast", title="probe kind", description="How deep to probe.")

    class WiderConfig(Config):
        probe: ProbeConfig = Field(ProbeConfig(), description="Probes.")

    monkeypatch.setattr("engine.config.schema.Config", WiderConfig)
    monkeypatch.setattr("tui.form.fields.Config", WiderConfig)
    section = form_sections()[-1]
    steps, kind = section.fields
    assert (section.title, steps.key, steps.label) == ("Probe", "probe.every_steps", "every steps")
    assert (kind.label, kind.choices, kind.is_fixed) == ("probe kind", ("fast", "full"), True)
    assert "How deep to probe." in help_text(kind).plain and "probe.kind" in help_text(kind).plain


def test_form_labels_fit_their_column_and_differ() -> None:
    for section in form_sections():
        labels = [info.label for info in section.fields]
        assert len(labels) == len(set(labels))
        assert max(map(len, labels)) <= LABEL_COLUMNS


def test_help_text_names_error_choices_default_and_key() -> None:
    [info] = [info for info in form_fields() if info.key == "data.drop_last"]
    text = help_text(info, "must be true or false").plain
    assert text.startswith("✗ must be true or false  drop last batch  data.drop_last  Drop the last")
    assert "Choices: false, true." in text and text.endswith("Default: true.")


def test_next_run_name_skips_names_that_are_taken(tmp_path: Path) -> None:
    form = Form("digits")
    (tmp_path / "digits-1").mkdir()
    assert next_run_name(form, form.config(), tmp_path) == "digits-2"
    own = Form("digits", {"data.dataset": "folder", "data.path": "/x/flowers"})
    assert next_run_name(own, own.config(), tmp_path) == "flowers-1"
    nothing = Form(None)
    assert next_run_name(nothing, nothing.config(), tmp_path) == "digits-cnn-1"


def test_completions_list_names_that_begin_with_text_first() -> None:
    kinds, completer = {info.key: info for info in form_fields()}, Completer()
    found = completer.completions(kinds["optim.name"], "ada", {})
    names = ["adam", "adamw", "adagrad", "adadelta", "adamax", "adafactor", "nadam", "radam"]
    assert [completion.value for completion in found] == names
    assert completer.completions(kinds["model.name"], "mine:build", {}) == []
    found = completer.completions(kinds["optim.nesterov"], "", {})
    assert [completion.value for completion in found] == ["", "false", "true"]
    assert completer.completions(kinds["run.epochs"], "1", {}) == []


def test_dependent_keys_refer_to_existing_keys() -> None:
    keys = {key for key, _ in fields()}
    assert set(DEPENDS_ON) <= keys
    assert {other for other, _ in DEPENDS_ON.values()} <= keys
    values = Form("digits").values()
    assert is_relevant("optim.momentum", values)
    assert not is_relevant("optim.betas", values)


def test_form_checks_report_each_invalid_key() -> None:
    form = Form("digits", {"run.epochs": "many", "optim.lr": "-1", "data.dataset": "cifar"})
    assert {problem.location for problem in validate_form(form)[1]} == {"run.epochs", "optim.lr", "data.dataset"}


def test_form_ignores_value_equal_to_base() -> None:
    form = Form("digits")
    form.set_value("optim.lr", "0.2")
    form.set_value("optim.lr", "0.1")
    assert form.arguments() == ["run", "digits"]


def test_lr_curve_matches_training_schedule() -> None:
    config = Form("digits", {"run.epochs": "4", "optim.lr_scaling": "linear"}).config()
    epochs, rates = lr_curve(config, ranks=2, steps_per_epoch=11, max_points=1000)
    expected = [0.2 * lr_factor(config.schedule, step, 11, 4) for step in range(1, 45)]
    assert np.allclose(rates, expected)
    assert epochs[-1] == 4.0


def test_form_choices_are_remembered_without_name() -> None:
    assert load_last_form() == Form("digits")
    save_last_form(Form("digits", {"optim.lr": "0.3", "run.name": "a"}))
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
    for refused in (form.arguments, lambda: form.save_preset("mine")):
        with pytest.raises(UsageError) as error:
            refused()
        assert "hunter2" not in str(error.value)


def test_form_saves_preset_under_name() -> None:
    form = Form("digits", {"optim.lr": "0.3", "run.name": "a"})
    path = form.save_preset("my digits")
    assert presets()["my-digits"] == path
    saved, typed = resolve_config("my-digits").config, form.config()
    assert as_dict(saved) | {"run": None} == as_dict(typed) | {"run": None}
    assert saved.run.name is None
    with raises_problem("name-in-use"):
        form.save_preset("my digits")


def test_form_accepts_preset_that_requires_data_path() -> None:
    form = Form("flowers")
    assert form.values()["model.name"] == "resnet34"
    assert [problem.location for problem in validate_form(form)[1]] == ["data.path"]
    form.set_value("data.path", "/data/flowers")
    assert form.arguments() == ["run", "flowers", "--data-path", "/data/flowers"]


def test_form_drops_parameters_of_previous_optimizer() -> None:
    form = Form("digits", {"optim.momentum": "0.8", "optim.lr": "0.2"})
    form.set_value("optim.name", "adamw")
    assert form.overrides == {"optim.lr": "0.2", "optim.name": "adamw"}
    assert validate_form(form)[1] == []


def test_form_shows_data_path_for_user_dataset() -> None:
    assert is_relevant("data.path", {"data.dataset": "mine:build"})
    assert is_relevant("optim.betas", {"optim.name": "mine:build"})
    assert not is_relevant("data.path", {"data.dataset": "digits"})


def test_form_fields_mark_open_choices() -> None:
    kinds = {info.key: info for info in form_fields()}
    assert kinds["optim.lr_scaling"].choices and not kinds["optim.lr_scaling"].allows_other
    assert "cosine" in kinds["schedule.name"].choices and kinds["schedule.name"].allows_other
    assert "adamw" in kinds["optim.name"].choices and kinds["optim.name"].allows_other
    assert kinds["data.dataset"].allows_other and kinds["loss.name"].allows_other and kinds["model.freeze"].allows_other
    assert not kinds["data.workers"].choices and not kinds["data.batch_size"].choices


def test_form_of_run_picks_free_name(tmp_path: Path) -> None:
    for name in ("a-3", "a-4", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"run: {{name: {name}}}\noptim: {{lr: 0.7}}\n")
    again = form_from_run(tmp_path / "a-3" / "config.yaml")
    assert (again.config().run.name, again.config().optim.lr) == ("a-5", 0.7)
    assert form_from_run(tmp_path / "b" / "config.yaml").config().run.name == "b-2"


@pytest.fixture
def checker(tmp_path: Path) -> Iterator[FormChecker]:
    checker = FormChecker(tmp_path / "runs")
    yield checker
    checker.cancel()


def check(checker: FormChecker, snapshot: Snapshot | None = None, **typed: str) -> tuple[int, list[Problem]]:
    form = Form("digits", {key.replace("__", "."): text for key, text in typed.items()})
    config, invalid = validate_form(form)
    assert config is not None
    checked = checker.check(checker.begin(config), config, snapshot, invalid)
    assert checked is not None
    return checked.total_ranks, checked.problems


def test_checker_counts_ranks_steps_and_images(checker: FormChecker) -> None:
    config = Form("digits").config()
    checked = checker.check(checker.begin(config), config, None)
    assert checked is not None and checked.sampler is not None
    assert (checked.total_ranks, checked.sampler.steps_per_epoch, checked.sampler.train_images) == (2, 22, 1438)
    assert check(checker, demo_snapshot(FROZEN_NOW), device__gpus="2,3") == (2, [])
    config = Form("digits", {"device.gpus": "cpu", "precision.amp": "O2"}).config()
    warned = checker.check(checker.begin(config), config, None)
    assert warned is not None and has_problem([*warned.warnings], "slow-precision", "precision.amp", "O2")
    assert f"! {warned.warnings[0]}" in plan_text(config, [], warned).plain.splitlines()
    config = Form(None, {"data.dataset": "fake", "data.fake_train": "20"}).config()
    assert "global batch size 20" in plan_text(config, [], checker.check(checker.begin(config), config, None)).plain


def test_plan_says_in_one_line_what_gpus_compute_in(checker: FormChecker) -> None:
    config = Form("digits", {"device.gpus": "2,3", "precision.amp": "auto"}).config()
    snapshot = demo_snapshot(FROZEN_NOW)
    gpus = tuple(replace(gpu, compute_capability=Reading("9.0", 0.0)) for gpu in snapshot.gpus)
    checked = checker.check(checker.begin(config), config, replace(snapshot, gpus=gpus))
    assert "Precision: bf16 AMP (auto), TF32" in plan_text(config, [], checked).plain.splitlines()


def test_checker_warns_of_keys_without_effect(checker: FormChecker) -> None:
    form = Form("digits", {"schedule.power": "2", "device.empty_cache": "true", "device.gpus": "cpu"})
    config = form.config()
    checked = checker.check(checker.begin(config), config, None, typed=form.overrides, warnings=form.warnings())
    assert checked is not None
    power, empty_cache = checked.warnings
    assert has_problem([power], "no-effect", "", "schedule.power=2.0", "schedule.name=cosine", "polynomial")
    assert has_problem([empty_cache], "no-effect", "", "device.empty_cache=true")
    assert {f"! {power}", f"! {empty_cache}"} <= {*plan_text(config, [], checked).plain.splitlines()}


def test_checker_reports_missing_host_resources(checker: FormChecker) -> None:
    snapshot = demo_snapshot(FROZEN_NOW)
    assert has_problem(check(checker, snapshot, device__gpus="9")[1][:1], "gpu-not-found", "device.gpus", "'9'")
    assert has_problem(check(checker, model__name="cnnn")[1][:1], "unknown-value", "model.name", "did you mean cnn?")
    assert has_problem(check(checker, data__batch_size="2000")[1][:1], "too-large", "data.batch_size", "4000")
    missing = check(checker, data__dataset="folder", data__path="/nowhere")[1][:1]
    assert has_problem(missing, "not-found", "data.path", "/nowhere")


@pytest.mark.usefixtures("preflight_in_process")
def test_checker_reports_invalid_values_with_problems_of_host(checker: FormChecker, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    _, problems = check(checker, optim__lr="-1", model__name="cnnn", run__name="a")
    assert [problem.location for problem in problems] == ["optim.lr", "model.name", "run.name"]


def test_checker_cancels_scan_of_other_data(checker: FormChecker) -> None:
    config = Form("digits").config()
    checker.check(checker.begin(config), config, None)
    os.kill(checker._helpers["preflight"]._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(checker.check, checker.begin(config), config, None)
        wait_for(lambda: checker._turns["preflight"].locked(), "the first check")
        assert check(checker, data__dataset="fake", data__image_size="8")[1] == []
        assert hanging.result() is None


def test_checker_builds_model_unless_newer_check_begins(checker: FormChecker) -> None:
    config = Form("digits", {"model.freeze": "[nothing]"}).config()
    [problem] = checker.check_model(checker.begin(config), config, on_gpu=False).problems
    assert has_problem([problem], "unknown-value", "model.freeze", "'nothing'")
    with ThreadPoolExecutor(1) as pool:
        delayed = pool.submit(checker.check_model, checker.begin(config), config, on_gpu=False)
        checker.cancel()
        assert delayed.result().problems == []


def test_checker_starts_no_helper_for_canceled_check(checker: FormChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.form.checks.start_helper", lambda *_, **__: pytest.fail("started a process"))
    config = Form("digits").config()
    canceled = checker.begin(config)
    # A newer check, which is not that of the thread whose model check comes late.
    checker.begin(config)
    assert checker.check(canceled, config, None) is None
    assert checker.check_model(canceled, config, on_gpu=False).problems == []


def test_checker_ends_threads_of_replaced_checks_while_helper_hangs(checker: FormChecker) -> None:
    config = Form("digits").config()
    checker.check(checker.begin(config), config, None)
    os.kill(checker._helpers["preflight"]._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        pool.submit(checker.check, checker.begin(config), config, None)
        wait_for(lambda: checker._turns["preflight"].locked(), "the first check")
        queued = [pool.submit(checker.check, checker.begin(config), config, None) for _ in range(3)]
        assert [replaced.result(timeout=10) for replaced in queued[:-1]] == [None, None]
        checker.cancel()


def test_checker_answers_concurrent_requests_with_their_own_answers(checker: FormChecker) -> None:
    canceled = checker.begin(Form("digits").config())
    refused = [Form("digits", {"model.freeze": f"[nothing{number}]"}).config() for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda config: checker.check_model(canceled, config, on_gpu=False).problems, refused)
        for number, [problem] in enumerate(answers):
            assert has_problem([problem], "unknown-value", "model.freeze", f"'nothing{number}'")


def test_checker_gives_up_hanging_transform_for_other_transform(
    checker: FormChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "import time\n\n\ndef hang(image):\n    time.sleep(1000)\n\n\ndef same(image):\n    return image\n"
    (tmp_path / "slow.py").write_text(program)
    hanging = Form("digits", {"augment.transform": "slow:hang"}).config()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(checker.check, checker.begin(hanging), hanging, None)
        wait_for(lambda: checker._turns["preflight"].locked(), "the first check")
        assert check(checker, augment__transform="slow:same")[1] == []
        assert first.result() is None


@pytest.mark.usefixtures("preflight_in_process")
def test_checker_knows_no_devices_before_first_snapshot_or_while_run_waits(checker: FormChecker) -> None:
    needs_gpus = {"model__sync_bn": "true", "model__name": "resnet18", "device__backend": "nccl"}
    pending = replace(demo_snapshot(FROZEN_NOW), gpus=(), error="no answer yet", pending=True)
    busy = demo_snapshot(FROZEN_NOW)
    busy = replace(busy, gpus=tuple(gpu for gpu in busy.gpus if find_current_use(gpu) is not None))
    assert check(checker, device__gpus="auto", **needs_gpus)[1] == []
    assert check(checker, pending, device__gpus="auto", **needs_gpus)[1] == []
    assert check(checker, busy, device__gpus="auto", device__wait="true", **needs_gpus)[1] == []
    problems = check(checker, replace(pending, pending=False), device__gpus="auto", **needs_gpus)[1]
    assert [problem.location for problem in problems] == ["device.backend"]


def test_run_arguments_write_keys_without_flag_as_key_value() -> None:
    before = resolve_config("digits").config
    after = resolve_config("digits", ["data.mean=[0.5]", "run.epochs=3"]).config
    assert run_arguments("digits", before, after) == ["run", "digits", "--epochs", "3", "data.mean=[0.5]"]


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

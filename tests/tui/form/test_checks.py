"""The checks of the form, which run beside the screen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.base.errors import Problem
from engine.gpus.snapshot import Snapshot
from support.gputrain_command import wait_for
from support.messages import has_problem
from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from tui.form.checks import FormChecker
from tui.form.model import (
    Form,
    validate_form,
)
from tui.form.plan import plan_text


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
    assert warned is not None and has_problem([*warned.preflight.warnings], "slow-precision", "precision.amp", "O2")
    assert f"! {warned.preflight.warnings[0]}" in plan_text(config, [], warned).plain.splitlines()
    config = Form(None, {"data.dataset": "fake", "data.fake_train": "20"}).config()
    assert "global batch size 20" in plan_text(config, [], checker.check(checker.begin(config), config, None)).plain


def test_checker_warns_of_keys_without_effect(checker: FormChecker) -> None:
    form = Form("digits", {"schedule.power": "2", "device.empty_cache": "true", "device.gpus": "cpu"})
    config = form.config()
    checked = checker.check(checker.begin(config), config, None, typed=form.overrides, warnings=form.warnings())
    assert checked is not None
    power, empty_cache = checked.preflight.warnings
    assert has_problem([power], "no-effect", "", "schedule.power=2.0", "schedule.name=cosine", "polynomial")
    assert has_problem([empty_cache], "no-effect", "", "device.empty_cache=true")
    assert {f"! {power}", f"! {empty_cache}"} <= {*plan_text(config, [], checked).plain.splitlines()}


@pytest.mark.expensive("builds the catalogs of models and optimizers, unless another test did")
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


@pytest.mark.nightly
def test_checker_cancels_scan_of_other_data(checker: FormChecker) -> None:
    config = Form("digits").config()
    checker.check(checker.begin(config), config, None)
    helper = checker._helper
    assert helper is not None
    os.kill(helper._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(checker.check, checker.begin(config), config, None)
        wait_for(lambda: checker._turn.locked(), "the first check")
        assert check(checker, data__dataset="fake", data__image_size="8")[1] == []
        assert hanging.result() is None

"""A sweep is validated before anything starts, with every problem in one message; sweep.yaml keeps its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.base import codec
from engine.base.errors import Problem, UsageError
from engine.config.code_trust import CodeTrust
from engine.config.loader import resolve_config
from engine.config.run_name import name_problem
from engine.config.settings import Limits
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.plan import SweepPlan, device_overrides, plan_sweep
from engine.jobs.sweeps.settings import MONITORED, SweepSettings, read_settings, split_space, write_settings
from engine.jobs.sweeps.start import check_name, choose_folder, create_sweep, load_sweep, plan_lines
from engine.jobs.sweeps.trial import make_trial
from engine.runs.folder import sweep_of_trial
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line
from support.messages import has_problem, raises_problem

CPU = {"device.gpus": "cpu"}


def plan(tmp_path: Path, *arguments: str, **settings: object) -> SweepPlan:
    space, fixed = split_space(tuple(text.split("=", 1)) for text in arguments)  # type: ignore[misc]
    values = {"config": "digits", "space": space, "fixed": fixed | CPU} | settings
    return plan_sweep(SweepSettings(**values), tmp_path, trust=CodeTrust())  # type: ignore[arg-type]


def problems(tmp_path: Path, *arguments: str, **settings: object) -> list[Problem]:
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, *arguments, **settings)
    return caught.value.problems


@pytest.mark.expensive("builds the catalogs of models and optimizers, unless another test did")
def test_plan_reports_every_problem_of_every_end_and_choice_at_once(tmp_path: Path) -> None:
    searched = ("optim.lr=-1..0.5", "optim.name=sgd,adamax2", "run.epoch=1..5", "model.name=cnn,nosuch")
    found = problems(tmp_path, *searched, "data.val_split=2")
    assert len(found) == 5
    for code, location, value in (
        ("out-of-range", "optim.lr", "-1.0"),
        ("unknown-value", "optim.name", "'adamax2'"),
        ("unknown-key", "run.epoch", ""),
        ("unknown-value", "model.name", "'nosuch'"),
        ("out-of-range", "data.val_split", "2"),
    ):
        assert has_problem(found, code, location, value), (location, [(it.code, str(it)) for it in found])


@pytest.mark.parametrize(
    ("monitor", "metric"),
    [
        ("auto", "best_val_accuracy"),
        ("loss", "best_val_loss"),
        ("top5", "val_top5"),
        ("macro_f1", "metrics.macro_f1=high"),
    ],
)
def test_sweep_without_a_metric_has_that_of_the_monitor(tmp_path: Path, monitor: str, metric: str) -> None:
    planned = plan(tmp_path, "optim.lr=0.1,0.2", f"run.monitor={monitor}", metric=MONITORED)
    assert planned.settings.metric == metric and planned.settings.objective is not None


@pytest.mark.parametrize(
    ("metric", "set_to", "monitor"),
    [
        ("best_val_loss", "auto", "loss"),
        ("metrics.macro_f1=high", "auto", "macro_f1"),
        ("best_val_accuracy", "auto", "auto"),
        ("train_loss", "auto", "auto"),
        ("best_val_loss", "macro_f1", "macro_f1"),
    ],
)
def test_trials_of_a_sweep_are_monitored_by_its_metric(tmp_path: Path, metric: str, set_to: str, monitor: str) -> None:
    planned = plan(tmp_path, "optim.lr=0.1,0.2", f"run.monitor={set_to}", metric=metric)
    assert planned.config.run.monitor == monitor and planned.settings.metric == metric


def test_metric_of_another_task_is_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, "optim.lr=0.1,0.2", metric="metrics.mAP=high")
    assert {problem.location for problem in found} == {"run.monitor"} and "macro_f1" in found[0].reason


def test_trials_at_the_same_time_are_refused_beyond_the_limit_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.jobs.sweeps.settings.read_limits", lambda: Limits(runs=2))
    settings = SweepSettings(space={"optim.lr": "0.1,0.2"})
    assert codec.replace(settings, parallel=2).check()[1] == []
    found = codec.replace(settings, parallel=3).check()[1]
    assert has_problem(found, "over-limit", "--parallel", "3", "limits.runs is 2")


@pytest.mark.parametrize(("typed", "lr"), [([], 0.001), (["optim.lr=0.3"], 0.3)])
def test_trial_of_another_optimizer_has_its_own_learning_rate_unless_one_is_typed(
    tmp_path: Path, typed: list[str], lr: float
) -> None:
    planned, folder = plan(tmp_path, "optim.name=sgd,adamw", *typed), SweepFolder(tmp_path / "s")
    create_sweep(folder, planned)
    config, *overrides = make_trial(folder, planned, 1).line({"optim.name": "adamw"}, CPU)[0]
    assert resolve_config(config, overrides).config.optim.lr == lr


def test_plan_refuses_reserved_keys_and_a_sweep_without_space(tmp_path: Path) -> None:
    with raises_problem("not-supported", "run.name"):
        plan(tmp_path, "run.name=a,b")
    assert has_problem(problems(tmp_path, "run.epochs=3"), "missing-value", "", "KEY=SPACE")


@pytest.mark.parametrize("searched", ["optim.lr=0.01,0.1", "data.batch_size=16,64"])
def test_sweep_keeps_default_batch_size_open_unless_it_is_searched(tmp_path: Path, searched: str) -> None:
    fake = ("data.dataset=fake", "data.fake_train=20", "model.name=linear")
    planned = plan(tmp_path, searched, *fake, config=None)
    create_sweep(SweepFolder(tmp_path / "s"), planned)
    is_set = "batch_size" in resolve_config(str(tmp_path / "s" / "config.yaml")).config.data.model_fields_set
    assert is_set == searched.startswith("data.batch_size")


def test_plan_finds_preset_in_space_and_names_what_is_outside(tmp_path: Path) -> None:
    planned = plan(tmp_path, "optim.lr=log:1e-3..0.5", "optim.name=adamw,sgd", "run.epochs=2..4")
    assert planned.preset == {"optim.lr": 0.1, "optim.name": "sgd"}
    assert "run.epochs" in list(plan_lines(SweepFolder(tmp_path / "s"), planned))[-1]
    grid = plan(tmp_path, "optim.lr=0.1,0.2,0.3", "optim.name=adamw,sgd", sampler="grid")
    assert grid.settings.trials == 6
    assert plan(tmp_path, "optim.lr=0.1..0.3", parallel=1).settings.device["device.gpus"] == "cpu"


def test_settings_survive_their_file_and_the_same_command_means_the_same_sweep(tmp_path: Path) -> None:
    planned = plan(tmp_path, "optim.lr=0.01..1", "run.epochs=2", trials=5)
    folder = choose_folder(tmp_path, None, planned, "digits")
    assert folder.name == "digits-sweep"
    create_sweep(folder, planned)
    assert read_settings(folder.settings) == planned.settings
    loaded = load_sweep(folder, {"trials": 9})
    assert loaded == replace(planned, settings=codec.replace(planned.settings, trials=9))
    assert read_settings(folder.settings).trials == 9

    assert choose_folder(tmp_path, None, planned, "digits") == folder
    other = replace(planned, settings=codec.replace(planned.settings, seed=1))
    assert choose_folder(tmp_path, None, other, "digits").name == "digits-sweep-2"
    with raises_problem("name-in-use", "--name", "digits-sweep", tmp_path, "`gputrain sweep resume digits-sweep`"):
        choose_folder(tmp_path, "digits-sweep", other, "digits")
    (tmp_path / "taken-007").mkdir()
    with raises_problem("name-in-use", "--name", "taken-007"):
        choose_folder(tmp_path, "taken", other, "digits")


def test_paths_of_a_sweep_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space, fixed = split_space([("data.path", "a,/b"), ("model.weights", "pretrained,w.pt"), ("run.code", "code")])
    assert space == {"data.path": f"{tmp_path}/a,/b", "model.weights": f"pretrained,{tmp_path}/w.pt"}
    assert fixed == {"run.code": f"{tmp_path}/code"}
    shards = "train-{000..146}.tar"
    assert split_space([], [("data.path", shards)]) == ({}, {"data.path": f"{tmp_path}/{shards}"})


def test_continued_sweep_of_another_user_runs_only_with_trust_and_sets_no_other_keys(tmp_path: Path) -> None:
    planned = plan(tmp_path, "optim.lr=0.01..1")
    folder = choose_folder(tmp_path, "a", planned, "digits")
    create_sweep(folder, planned)
    folder.settings.chmod(0o666)
    with raises_problem("untrusted-code", "a", "sweep.yaml", "--trust-code"):
        load_sweep(folder, {})
    assert load_sweep(folder, {}, trust_code=True).settings == planned.settings
    text = folder.settings.read_text().replace(
        "device.gpus: cpu\n  device.threads", "model.name: evil:model\n  device.threads"
    )
    folder.settings.write_text(text)
    with raises_problem("damaged", str(folder.settings), "device"):
        load_sweep(folder, {}, trust_code=True)


def test_trials_take_one_gpu_and_wait_for_it_unless_the_user_chooses(
    tmp_path: Path, loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    # A process of another user computes on the only GPU.
    loaded_gpu_host.set_scene([gpu_line(0), f"process 0 {UNKNOWN_PID} 4096 compute"])
    config = resolve_config("digits").config
    assert device_overrides(config, 4) == {"device.gpus": "free:1", "device.wait": "true"}
    both = resolve_config("digits", ["device.gpus=free:2"]).config
    assert device_overrides(both, 4) == {"device.gpus": "free:2", "device.wait": "true"}
    monkeypatch.setattr("engine.jobs.sweeps.plan.available_cores", lambda: 16)
    on_cpu = resolve_config("digits", ["device.gpus=cpu", "device.ranks=2"]).config
    assert device_overrides(on_cpu, 4) == {"device.gpus": "cpu", "device.threads": "2"}


@pytest.mark.parametrize(("line", "found"), [("format: 2", "format 2"), ("", "no format")])
def test_settings_of_another_format_are_refused(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "sweep.yaml"
    write_settings(path, SweepSettings(space={"optim.lr": "0..1"}))
    path.write_text(path.read_text().replace("format: 1", line))
    with raises_problem("wrong-version", str(path), found, "reads format 1"):
        read_settings(path)


@pytest.mark.parametrize(
    ("line", "changed", "reason"),
    [("seed: 0\n", "", "lacks seed"), ("trials: 40", "trials: many", "trials"), ("best_val_accuracy", "f1", "'f1'")],
)
def test_damaged_settings_are_refused(tmp_path: Path, line: str, changed: str, reason: str) -> None:
    path = tmp_path / "sweep.yaml"
    write_settings(path, SweepSettings(space={"optim.lr": "0..1"}))
    path.write_text(path.read_text().replace(line, changed))
    with raises_problem("damaged", str(path), reason):
        read_settings(path)


def test_sweep_name_leaves_room_for_its_trials(tmp_path: Path) -> None:
    name = "花" * 63
    assert check_name(name) == name
    trial = SweepFolder(tmp_path / name).trial(1234567).name
    assert name_problem(trial) is None and sweep_of_trial(trial) == (name, 1234567)
    for invalid in ("花" * 64, "x" * 91, "last", "a/b"):
        with raises_problem("invalid-name", "--name"):
            check_name(invalid)

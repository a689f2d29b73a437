"""User code that a checkpoint names: it runs only where the user's own run names the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import Problem, UsageError
from engine.config.code_trust import CodeTrust
from engine.config.loader import validate_config
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.folder import RunFolder
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import build_architecture, limit_to_run, read_trained_checkpoint
from support.messages import has_problem, raises_problem
from support.runs.trained_run import saved_run


def config_of(code: Path | str = "/code", **sections: dict[str, object]) -> Config:
    values: dict[str, dict[str, object]] = {
        "model": {"name": "nets:build", "options": {"depth": 2}},
        "data": {"dataset": "sets:images", "path": "/data"},
        "run": {"code": str(code)},
    }
    return validate_config(values | sections)


@pytest.fixture
def own_run(tmp_path: Path) -> RunFolder:
    """Run of this user whose config names a model and a dataset."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir(mode=0o700)
    run.config.write_text(to_yaml(as_stored(config_of())))
    run.config.chmod(0o600)
    return run


def test_checkpoint_with_names_of_run_is_trusted(own_run: RunFolder) -> None:
    assert limit_to_run(config_of(), Path("a.pt"), own_run)[1] == {}


def test_checkpoint_with_other_name_is_foreign(own_run: RunFolder, tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.pt"
    checkpoint.touch()
    checkpoint.chmod(0o666)
    _, foreign = limit_to_run(config_of(model={"name": "subprocess:getoutput"}), checkpoint, own_run)
    assert foreign.keys() == {"model.name"}
    assert str(checkpoint) in foreign["model.name"] and str(own_run.config) in foreign["model.name"]


def test_checkpoint_takes_folder_and_arguments_of_code_from_run(own_run: RunFolder) -> None:
    planted = config_of(
        "/planted",
        model={"name": "nets:build", "options": {"weights": "/planted.pkl"}},
        data={"dataset": "sets:images", "path": "/planted"},
    )
    config, _ = limit_to_run(planted, Path("a.pt"), own_run)
    assert (config.run.code, config.model.options, config.data.path) == ("/code", {"depth": 2}, "/data")


def test_checkpoint_of_run_without_config_is_foreign(tmp_path: Path) -> None:
    config, foreign = limit_to_run(config_of(), Path("a.pt"), RunFolder(tmp_path))
    assert foreign.keys() == {"model.name", "data.dataset"}
    assert config.run.code is None


@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_checkpoint_in_run_that_others_can_write_is_foreign(own_run: RunFolder, name: str) -> None:
    path = own_run.path / name
    path.chmod(path.stat().st_mode | 0o002)
    _, foreign = limit_to_run(config_of(), Path("a.pt"), own_run)
    assert foreign.keys() == {"model.name", "data.dataset"}
    assert all(str(own_run.path) in reason for reason in foreign.values())


def test_checkpoint_takes_loading_of_images_from_run(own_run: RunFolder) -> None:
    loading = {"batch_size": 8, "workers": 1, "prefetch": 2, "on_bad": "skip", "fake_train": 10, "fake_val": 20}
    own_run.config.write_text(to_yaml(as_stored(config_of(data={"dataset": "fake"} | loading))))
    planted = dict.fromkeys(loading, 10**9) | {"on_bad": "fail"}
    config, _ = limit_to_run(config_of(data={"dataset": "fake"} | planted), Path("a.pt"), own_run)
    assert {key: getattr(config.data, key) for key in loading} == loading


@pytest.fixture
def planted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Run whose checkpoint names code in the working folder, which the run's config does not name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_code.py").write_text("open('ran', 'w').close()\n")
    planted = {"model": {"name": "planted_code:build"}, "data": {"dataset": "planted_code:images"}}
    planted |= {"eval": {"metrics": ["planted_code:f1"]}, "optim": {"name": "planted_code:f1"}}
    return saved_run(tmp_path / "planted", {"config": as_stored(validate_config(planted))})


def test_build_architecture_imports_no_foreign_code(planted_run: RunFolder, tmp_path: Path) -> None:
    with raises_problem("untrusted-code", "model.name", "planted_code:build", "last.pt", "--trust-code"):
        build_architecture(read_trained_checkpoint(planted_run, "last"))
    assert not (tmp_path / "ran").exists()


def test_evaluation_imports_no_foreign_code(planted_run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate_checkpoint(read_trained_checkpoint(planted_run))
    assert {problem.location for problem in caught.value.problems} == {"model.name", "data.dataset", "eval.metrics"}
    with pytest.raises(UsageError) as caught:
        evaluate_checkpoint(read_trained_checkpoint(planted_run), ["data.dataset=digits"])
    assert {problem.location for problem in caught.value.problems} == {"model.name", "eval.metrics"}
    assert not (tmp_path / "ran").exists()


def test_granted_trust_imports_foreign_code(planted_run: RunFolder, tmp_path: Path) -> None:
    messages: list[Problem] = []
    checkpoint = read_trained_checkpoint(planted_run, code_trust=CodeTrust(True, notify=messages.append))
    with raises_problem("not-found", "model.name", "planted_code", "build"):
        build_architecture(checkpoint)
    assert (tmp_path / "ran").exists()
    shown = ("--trust-code", "planted_code:build", tmp_path / "planted_code.py", planted_run.path)
    assert has_problem(messages[:1], "untrusted-code", None, "model.name", *shown)


@pytest.mark.parametrize("name", ["hf-hub:stranger/model", "local-dir:/planted", "resnet18.hf-hub:stranger/model"])
def test_checkpoint_cannot_name_downloaded_model(tmp_path: Path, name: str) -> None:
    values = {"model": {"name": name, "source": "timm"}, "data": {"dataset": "fake"}}
    run = saved_run(tmp_path / "a", {"config": as_stored(validate_config(values))})
    with raises_problem("unknown-value", "model.name"):
        build_architecture(read_trained_checkpoint(run))


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained"])
def test_checkpoint_cannot_load_files_through_timm_options(tmp_path: Path, option: str) -> None:
    values = {
        "model": {"name": "resnet18", "source": "timm", "options": {option: "/planted"}},
        "data": {"dataset": "fake"},
    }
    run = saved_run(tmp_path / "a", {"config": as_stored(validate_config(values))})
    with raises_problem("fixed-value", "model.options", option):
        build_architecture(read_trained_checkpoint(run))

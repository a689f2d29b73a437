"""User code of others and of installed packages, from the command line to the ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.config.yaml_io import to_yaml
from support.gputrain_command import Gputrain
from support.runs.trained_run import call, saved_run

SHORT = ("--headless", "--gpus", "cpu", "--epochs", "1", "--model", "linear", "run.log_every=50")


@pytest.fixture
def shared_config(tmp_path: Path) -> Path:
    """Config that all users can write to, which names a loss of the working folder."""
    path = tmp_path / "shared.yaml"
    path.write_text("loss: {name: 'their_code:loss'}\nmodel: {name: linear}\n")
    path.chmod(0o666)
    return path


@pytest.mark.nightly
def test_package_code_needs_packages_again_on_resume(gputrain: Gputrain) -> None:
    code = ("loss.name=torch.nn.functional:cross_entropy", "run.code_packages=torch")
    done = gputrain("run", *SHORT, *code, "--name", "packaged")
    assert done.returncode == 0, done.stderr
    assert "code_packages" not in (gputrain.runs / "packaged" / "config.yaml").read_text()
    refused = gputrain("resume", "packaged", "run.epochs=2", "--headless")
    assert refused.returncode == 2
    assert "loss.name: torch.nn.functional:cross_entropy: " in refused.stderr
    assert "run.code_packages=torch" in refused.stderr
    resumed = gputrain("resume", "packaged", "run.epochs=2", "run.code_packages=torch", "--headless")
    assert resumed.returncode == 0, resumed.stderr


def test_export_takes_code_packages_from_settings_that_its_advice_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    config = {"model": {"name": "torchvision.models:squeezenet1_0"}, "data": {"dataset": "fake"}}
    run = saved_run(tmp_path / "packaged", {"config": as_dict(validate_config(config))})
    run.config.write_text(to_yaml(config))
    refused = call("export", run.path)
    assert refused.exit_code == 2
    line, file = re.findall(r"with the line `(.+)` in (\S+),", refused.stderr)[0]
    Path(file).parent.mkdir(mode=0o700, parents=True)
    Path(file).write_text(line)
    assert "no module torchvision" not in call("export", run.path).stderr


def test_config_prints_foreign_code_without_importing_it(shared_config: Path) -> None:
    printed = call("config", shared_config, "--diff")
    assert (printed.exit_code, "their_code:loss" in printed.stdout) == (0, True)

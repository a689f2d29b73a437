"""Code trust: user code that other users name or can change runs only when the user trusts it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.base.errors import Problem, UsageError
from engine.base.trust import foreign_reason
from engine.config.code_trust import CodeTrust
from engine.config.loader import ConfigError, resolve_config
from engine.config.schema import Config
from support.messages import has_problem, raises_problem


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Folder with the package `trusted` and its module `nets`, which only this user can change."""
    folder = tmp_path / "code"
    package = folder / "trusted"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "nets.py").write_text("raise SystemExit('imported')\n")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def config(code: Path) -> Config:
    return Config.model_validate({"run": {"code": str(code)}, "model": {"name": "trusted.nets:build"}})


@pytest.mark.parametrize("path", [".", "trusted", "trusted/__init__.py", "trusted/nets.py", "trusted/__pycache__"])
def test_code_trust_refuses_what_others_can_write(code: Path, path: str) -> None:
    CodeTrust().check(config(code))
    changed = code / path
    changed.chmod(changed.stat().st_mode | 0o002)
    with pytest.raises(UsageError) as caught:
        CodeTrust().check(config(code))
    [problem] = caught.value.problems
    reason = foreign_reason(changed.stat())
    values = ("trusted.nets:build", f"{changed} {reason}", "--trust-code")
    assert reason is not None and has_problem([problem], "untrusted-code", "model.name", *values)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_code_trust_refuses_link_of_other_user(tmp_path: Path, code: Path) -> None:
    (tmp_path / "link").symlink_to(code)
    CodeTrust().check(config(tmp_path / "link"))
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with raises_problem("untrusted-code", "model.name", f"{tmp_path / 'link'} ", "uid 12345"):
        CodeTrust().check(config(tmp_path / "link"))


def test_code_trust_reports_module_file_and_reason_when_granted(code: Path) -> None:
    warnings: list[Problem] = []
    trust = CodeTrust(
        True, {"model.name": "/shared/a.yaml, which sets model.name, belongs to uid 12345"}, warnings.append
    )
    code.chmod(0o777)
    trust.check(config(code))
    values = (
        "model.name ",
        "trusted.nets:build",
        f"{code}/trusted/nets.py",
        "/shared/a.yaml",
        "uid 12345",
        f" {code} ",
    )
    assert len(warnings) == 1 and has_problem(warnings, "untrusted-code", "", "--trust-code", *values)


@pytest.fixture
def shared_config(tmp_path: Path) -> Path:
    """Config file that all users can write to, which names user code."""
    path = tmp_path / "shared.yaml"
    path.write_text("model: {name: 'theirs:build'}\nrun: {code: /theirs, epochs: 3}\n")
    path.chmod(0o666)
    return path


def test_resolve_config_refuses_code_of_file_that_others_can_write(shared_config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(str(shared_config))
    [problem] = caught.value.problems
    values = ("theirs:build", shared_config, foreign_reason(shared_config.stat()), "--trust-code")
    assert has_problem([problem], "untrusted-code", "model.name", *values)
    assert (caught.value.valid_part.model.name, caught.value.valid_part.run.code) == ("cnn", None)
    assert caught.value.valid_part.run.epochs == 3


def test_resolve_config_refuses_code_of_foreign_base_file(shared_config: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("base: shared.yaml\n")
    own.chmod(0o600)
    with raises_problem("untrusted-code", "model.name", shared_config, kind=ConfigError):
        resolve_config(str(own))


def test_resolve_config_reports_foreign_code_when_trusted(shared_config: Path) -> None:
    resolved = resolve_config(str(shared_config), trust_code=True)
    assert resolved.config.model.name == "theirs:build"
    assert resolved.foreign_code.keys() == {"model.name", "run.code"}


def test_resolve_config_drops_trusted_code_of_refused_config(shared_config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(str(shared_config), ["run.epochs=0"], trust_code=True)
    assert [problem.location for problem in caught.value.problems] == ["run.epochs"]
    assert caught.value.valid_part.model.name == "cnn"


def test_code_trust_reports_no_module_that_is_missing(code: Path) -> None:
    warnings: list[Problem] = []
    (code / "trusted" / "nets.py").unlink()
    CodeTrust(True, {"model.name": "a stranger names it"}, warnings.append).check(config(code))
    assert warnings == []

"""The user's settings file, and `run.code_packages`, which no other file can set."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.base.files import settings_file
from engine.base.trust import foreign_reason
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.settings import read_settings
from support.messages import raises_problem


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    settings_file().parent.mkdir(parents=True)
    return settings_file()


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def test_settings_allow_packages_in_all_runs(settings: Path) -> None:
    assert read_settings().run.code_packages == ()
    write(settings, "run: {code_packages: [torchvision, timm]}\n")
    resolved = resolve_config("digits")
    assert resolved.config.run.code_packages == ("torchvision", "timm")
    assert resolved.sources["run.code_packages"] == str(settings)


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: x}",
        "run: {epochs: 3}",
        "run: {code_packages: [a.b]}",
        "run: 3",
        "[1]",
        "run: {code_packages: {}}",
        "reservations: relative/folder",
        "hosts: lab1",
    ],
)
def test_settings_refuse_other_content(settings: Path, text: str) -> None:
    write(settings, text)
    with raises_problem("wrong-format", str(settings), "run: {code_packages"):
        read_settings()


def test_settings_name_line_of_invalid_yaml(settings: Path) -> None:
    write(settings, "run: {}\nhosts: [")
    with raises_problem("invalid-yaml", f"{settings}, line 2"):
        read_settings()


def test_settings_refuse_file_that_others_can_write(settings: Path) -> None:
    write(settings, "run: {code_packages: [torchvision]}\n", 0o666)
    with raises_problem("foreign-writable", str(settings), foreign_reason(settings.stat())):
        resolve_config("digits")


def test_settings_may_be_link_to_file_of_user(settings: Path, tmp_path: Path) -> None:
    write(tmp_path / "dotfile.yaml", "run: {code_packages: [timm]}\n")
    settings.symlink_to(tmp_path / "dotfile.yaml")
    assert read_settings().run.code_packages == ("timm",)
    (tmp_path / "dotfile.yaml").chmod(0o666)
    with raises_problem("foreign-writable", str(settings), foreign_reason(settings.stat())):
        read_settings()


def test_config_file_cannot_set_packages(tmp_path: Path, settings: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "file.yaml"
    write(base, "run: {code_packages: [subprocess]}\n")
    write(file, "base: base.yaml\n")
    with raises_problem("not-supported", "run.code_packages", f"run.code_packages (in {base}): ", settings):
        resolve_config(str(file))


def test_stored_config_omits_packages() -> None:
    config = resolve_config(None, ["run.code_packages=torchvision"]).config
    assert "code_packages" not in as_stored(config)["run"]
    assert as_stored(config, only_changed=True) == {}


def test_code_packages_refuses_invalid_names() -> None:
    with raises_problem("invalid-value", "run.code_packages", "'torch.nn'"):
        resolve_config(None, ["run.code_packages=[torch.nn]"])


def test_settings_refuse_link_to_inaccessible_file(settings: Path) -> None:
    settings.symlink_to("/" + "a" * 300)
    with raises_problem("not-readable", str(settings), os.strerror(errno.ENAMETOOLONG)):
        read_settings()


def test_settings_refuse_pipe(settings: Path) -> None:
    os.mkfifo(settings)
    with raises_problem("not-readable", str(settings)):
        read_settings()


def test_settings_name_hosts_in_their_order(settings: Path) -> None:
    assert read_settings().hosts == ()
    write(settings, "hosts: [lab2, lab1]\n")
    assert read_settings().hosts == ("lab2", "lab1")

"""User folders that other users can change: nothing in them is read or written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from engine.base.answers import Answer
from engine.base.codec import find_user_record, write_user_record
from engine.base.files import (
    cache_folder,
    config_folder,
    make_user_folder,
    own_folder_advice,
    state_folder,
    user_path_problem,
)
from engine.base.libraries import installed_version
from engine.config.loader import find_config, presets, resolve_config
from engine.train.data.sources.decoded_cache import DecodedChunks, load_or_decode
from engine.train.models.catalog import (
    CatalogModel,
    ModelListing,
    read_listing,
)
from support.messages import has_problem, raises_problem
from tui.form.model import Form, load_last_form, save_last_form

OTHER_UID = 12345
FOLDERS = {"XDG_CACHE_HOME": cache_folder, "XDG_CONFIG_HOME": config_folder, "XDG_STATE_HOME": state_folder}


@pytest.fixture(autouse=True)
def user_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / name))


def make_foreign(path: Path) -> None:
    """Let other users change a path: as root by its owner, otherwise by its mode."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_UID, OTHER_UID)
    else:
        path.chmod(0o777)


@pytest.mark.parametrize("foreign", ["", "presets", "presets/a.yaml"])
def test_user_path_problem_names_foreign_part_of_path(foreign: str) -> None:
    (config_folder() / "presets").mkdir(parents=True)
    (config_folder() / "presets" / "a.yaml").touch()
    assert user_path_problem(config_folder(), "presets/a.yaml") is None
    make_foreign(config_folder() / foreign)
    assert (user_path_problem(config_folder(), "presets/a.yaml") or "").startswith(f"{config_folder() / foreign} ")


def test_user_path_problem_is_none_for_missing_file_and_own_link(tmp_path: Path) -> None:
    assert user_path_problem(config_folder(), "settings.yaml") is None
    (tmp_path / "elsewhere").mkdir()
    config_folder().parent.mkdir()
    config_folder().symlink_to(tmp_path / "elsewhere")
    assert user_path_problem(config_folder(), "settings.yaml") is None
    make_foreign(tmp_path / "elsewhere")
    assert user_path_problem(config_folder(), "settings.yaml") is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_user_folder_is_not_created_behind_link_of_other_user(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache_folder().parent.mkdir()
    cache_folder().symlink_to(tmp_path / "elsewhere")
    os.chown(cache_folder(), OTHER_UID, OTHER_UID, follow_symlinks=False)
    with pytest.raises(PermissionError, match=rf"gputrain .* uid {OTHER_UID}"):
        make_user_folder(cache_folder(), "decoded")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_user_folder_and_its_files_are_private_with_any_umask(umask: int) -> None:
    previous = os.umask(umask)
    try:
        write_user_record(cache_folder(), "a.json", ModelListing(models=(), inputs={}))
    finally:
        os.umask(previous)
    assert cache_folder().stat().st_mode & 0o777 == cache_folder().parent.stat().st_mode & 0o777 == 0o700
    assert (cache_folder() / "a.json").stat().st_mode & 0o022 == 0
    assert find_user_record(cache_folder(), "a.json", ModelListing) == ModelListing(models=(), inputs={})


@pytest.mark.nightly
def test_foreign_catalog_is_neither_read_nor_written() -> None:
    cache_folder().mkdir(parents=True)
    path = cache_folder() / f"models-torchvision-{installed_version('torchvision')}.json"
    models = [{"source": "torchvision", "name": "planted", "weights": []}]
    path.write_text(json.dumps({"format": 1, "models": models, "inputs": {}}))
    assert [model.name for model in read_listing("torchvision").models] == ["planted"]
    make_foreign(cache_folder())
    assert "resnet18" in [model.name for model in read_listing("torchvision").models]
    assert "planted" in path.read_text()


def test_foreign_decoded_cache_is_neither_read_nor_written() -> None:
    def decode(value: int) -> DecodedChunks:
        return DecodedChunks((1, 1, 2, 2), [np.full((1, 1, 2, 2), value, np.uint8)])

    load_or_decode("k", lambda: decode(1))
    make_foreign(cache_folder())
    before = sorted(cache_folder().rglob("*"))
    decoded = load_or_decode("k", lambda: decode(2))
    assert int(decoded.images.sum()) == 8
    folder = cache_folder()
    values = (user_path_problem(folder), own_folder_advice("XDG_CACHE_HOME"))
    assert decoded.warning is not None and has_problem([decoded.warning], "not-writable", "", *values)
    assert sorted(cache_folder().rglob("*")) == before


def test_foreign_file_in_working_folder_does_not_replace_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "other"):
        Path(name).write_text("run: {epochs: 7}")
        Path(name).chmod(0o644)
    assert find_config("digits") == Path("digits")
    for name in ("digits", "other"):
        make_foreign(Path(name))
    assert find_config("digits") == presets()["digits"]
    assert find_config("./digits") == Path("digits")
    assert find_config("other") == Path("other")


@pytest.fixture(params=["missing", "inaccessible"])
def no_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and account, or whose home cannot be accessed."""
    for name in FOLDERS:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 12345)
    if request.param == "inaccessible":
        # Unlike a mode, a name that is too long (ENAMETOOLONG) also stops root.
        monkeypatch.setenv("HOME", "/" + "a" * 300)


@pytest.mark.usefixtures("no_home")
def test_config_resolves_without_home() -> None:
    assert resolve_config("digits").config.run.code_packages == ()
    assert presets()["digits"] == find_config("digits")


def test_foreign_presets_are_not_listed_and_are_refused_by_name() -> None:
    folder = config_folder() / "presets"
    folder.mkdir(parents=True)
    for name in ("mine", "digits"):
        (folder / f"{name}.yaml").write_text("run: {epochs: 7}")
    assert find_config("digits").parent == find_config("mine").parent == folder
    make_foreign(folder)
    assert "mine" not in presets()
    assert presets()["digits"].parent != folder
    with raises_problem("foreign-writable", "mine", f" {folder} ", "XDG_CONFIG_HOME"):
        find_config("mine")
    with raises_problem("not-found", "gone"):
        find_config("gone")


def test_lock_of_decoded_cache_cannot_be_held_by_other_users() -> None:
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    (cache_folder() / "decoded" / "k.lock").chmod(0o644)
    (cache_folder() / "decoded" / "k.json").unlink()
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    assert (cache_folder() / "decoded" / "k.lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("no_home")
def test_caches_are_empty_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ModelListing(models=(CatalogModel(source="torchvision", name="resnet18"),), inputs={})
    monkeypatch.setattr("engine.base.libraries.ask_helper", lambda *_: Answer(listed))
    assert find_user_record(cache_folder(), "a.json", ModelListing) is None
    assert "resnet18" in [model.name for model in read_listing("torchvision").models]
    decoded = load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    assert int(decoded.images.sum()) == 4
    assert load_last_form() == Form("digits")


def test_foreign_form_choices_are_neither_read_nor_written() -> None:
    save_last_form(Form("digits", {"run.epochs": "7"}))
    assert load_last_form().overrides == {"run.epochs": "7"}
    make_foreign(state_folder())
    assert load_last_form() == Form("digits")
    save_last_form(Form("digits", {"run.epochs": "9"}))
    assert "9" not in (state_folder() / "form.json").read_text()

"""Numbers set in place in YAML files: all other text stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import presets, resolve_config
from engine.config.yaml_edit import editable_config, set_number, with_number
from support.messages import raises_problem


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("optim:\n  lr: 0.1 # was 0.3\n  name: sgd\n", "optim:\n  lr: 0.05 # was 0.3\n  name: sgd\n"),
        ("optim: {lr: 0.1, name: sgd}  # flow\n", "optim: {lr: 0.05, name: sgd}  # flow\n"),
        ("{optim: {'lr': \"1\"}}", "{optim: {'lr': 0.05}}"),
        ("optim:\n  lr:\n  name: sgd\n", "optim:\n  lr: 0.05\n  name: sgd\n"),
        ("---\noptim:\n  lr: .1\n...\n", "---\noptim:\n  lr: 0.05\n...\n"),
        ("\ufeffoptim:\n  lr: 1\n", "\ufeffoptim:\n  lr: 0.05\n"),
    ],
)
def test_with_number_replaces_value(text: str, edited: str) -> None:
    assert with_number(text, "optim.lr", 0.05) == edited


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("# only\n", "# only\noptim:\n  lr: 0.05\n"),
        ("run:\n  epochs: 3", "run:\n  epochs: 3\noptim:\n  lr: 0.05\n"),
        ("optim: {}\n", "optim: {lr: 0.05}\n"),
        ("optim: {name: sgd}\n", "optim: {lr: 0.05, name: sgd}\n"),
        ("optim:\n    name: sgd # c\n", "optim:\n    lr: 0.05\n    name: sgd # c\n"),
        ("optim:\n  options:\n    a: 1\n", "optim:\n  lr: 0.05\n  options:\n    a: 1\n"),
        ("optim: &o\n  name: sgd\n", "optim: &o\n  lr: 0.05\n  name: sgd\n"),
        ("optim: !!map\n  options: {}\n", "optim: !!map\n  lr: 0.05\n  options: {}\n"),
    ],
)
def test_with_number_inserts_missing_key(text: str, edited: str) -> None:
    assert with_number(text, "optim.lr", 0.05) == edited


def test_with_number_changes_one_line_of_every_preset_that_has_the_key() -> None:
    texts = {path: path.read_text() for path in presets().values()}
    # Others inherit the key from the file in `base`.
    texts = {path: text for path, text in texts.items() if "  lr:" in text}
    assert len(texts) > 5
    for path, before in texts.items():
        after = with_number(before, "optim.lr", 0.0123)
        changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
        assert [line for _, line in changed] == ["  lr: 0.0123"], path


def test_with_number_refuses_value_that_others_share() -> None:
    with pytest.raises(ValueError, match=r"optim\.lr"):
        with_number("optim: &shared {lr: 1}\nother: *shared\n", "optim.lr", 0.05)


def test_set_number_writes_file_with_its_mode_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    file.write_text("base: b.yaml # base\nrun: {epochs: 1}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 3}\n")
    file.chmod(0o640)
    link.symlink_to(file)
    set_number(editable_config(str(link)), "optim.lr", 0.02)
    assert file.read_text() == "base: b.yaml # base\nrun: {epochs: 1}\noptim:\n  lr: 0.02\n"
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert resolve_config(str(file)).config.optim.lr == 0.02
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "b.yaml", "link.yaml"]


def test_editable_config_refuses_preset_and_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    with raises_problem("not-writable", "--set", "`gputrain config digits --diff > my-digits.yaml`"):
        editable_config("digits")
    with raises_problem("missing-value", "--set", "CONFIG"):
        editable_config(None)
    own = tmp_path / "settings" / "gputrain" / "presets" / "mine.yaml"
    own.parent.mkdir(parents=True, mode=0o700)
    own.write_text("")
    assert editable_config("mine") == own

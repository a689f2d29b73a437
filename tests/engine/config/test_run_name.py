"""Names of runs in any script: which are valid, and their one form."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.run_name import name_problem, run_stem
from support.messages import raises_problem


@pytest.mark.parametrize(
    "name",
    [
        *("", ".x", "-x", "_x", "a b", "a/b", "a\u00a0b", "a\u2028b", "a\u3000b", "x\n", "a\x1b[2J"),
        # Bidirectional controls, joiners, variation selectors, and letters that nobody sees.
        *("a\u202eb", "a\u2066b", "a\u200bb", "a\u200db", "\u3164", "a\ufe0f", "a\U000e0101", "a\u034fb"),
        # What looks like a separator or means something to a shell or to an option.
        *("a\u2215b", "a\uff0fb", "a\uff1ab", "a*", "a~2", "a:any", "a,b", "花=1", "🌸", "a²"),
        # A mark needs a letter before it.
        *("\u0301a", "x" * 101, "花" * 67),
    ],
)
def test_invalid_name_is_refused(name: str) -> None:
    assert name_problem(name) is not None
    if name:
        with raises_problem("invalid-name", "run.name"):
            resolve_config("digits", [f"run.name={name}"])


@pytest.mark.parametrize(
    ("base", "typed", "stem"),
    [
        ("digits", (), "digits"),
        ("digits", ("data.dataset=folder", "data.path=/x/my flowers/"), "my-flowers"),
        ("digits", ("data.dataset=webdataset", "data.path=/x/shards"), "shards"),
        (None, ("data.dataset=webdataset", "data.path=/x/train-{00..10}.tar"), "webdataset-cnn"),
        (None, ("data.dataset=folder", "data.path=."), "here"),
        (None, ("data.dataset=folder", "data.path=/"), "folder-cnn"),
        (None, (), "digits-cnn"),
        # The folder of a download is none of one's own, and a config file has a name of one's own.
        ("mnist", ("data.path=/x/downloads",), "mnist"),
        ("mine.yaml", ("data.path=/x/flowers",), "mine"),
        ("mine.yaml", (), "mine"),
    ],
)
def test_run_without_name_has_that_of_its_own_file_or_folder(
    base: str | None, typed: tuple[str, ...], stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.yaml").write_text("data: {dataset: folder, path: /x/other}\n")
    resolved = resolve_config(base, list(typed))
    assert run_stem(base, resolved.config, resolved.typed) == stem

"""`gputrain clean`: what it asks before it deletes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tui.cli.main import app


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "gputrain").mkdir()
    (tmp_path / "gputrain" / "models-a.json").write_text("{}")
    return tmp_path / "gputrain" / "models-a.json"


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_clean_deletes_what_it_lists_if_the_answer_is_yes(
    cached: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr("tui.cli.console.is_interactive", lambda: True)
    done = CliRunner().invoke(app, ["clean"], input=answer)
    assert f"{cached.parent}/models*" in done.stdout and "Delete 1 file, 2 B? [y/N]:" in done.stderr
    assert (done.exit_code, cached.exists()) == (code, code == 1)


def test_clean_without_terminal_lists_and_deletes_nothing_unless_told(cached: Path) -> None:
    assert CliRunner().invoke(app, ["clean"]).exit_code == 2 and cached.exists()
    assert CliRunner().invoke(app, ["clean", "--json"]).exit_code == 0 and cached.exists()
    assert CliRunner().invoke(app, ["clean", "--yes"]).stderr == "Deleted 1 file, 2 B.\n" and not cached.exists()

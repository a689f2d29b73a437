"""Where torch is missing, what needs it is refused in one sentence. `tests/core` shows it in a real environment."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.base.errors import Problem
from engine.config.loader import resolve_config
from engine.jobs.launch.preflight import run_preflight
from engine.jobs.launch.request import RunRequest
from support.messages import has_problem, says
from tui.cli.main import app
from tui.cli.tree import COMMANDS

ARGUMENTS = {
    **{name: ["digits"] for name in ("bench", "data show", "lr-find", "models show", "run")},
    **{name: ["last"] for name in ("export", "resume", "sweep resume")},
    "predict": ["last", "photo.png"],
    "queue resume": [],
    "sweep run": ["digits", "optim.lr=0.1,0.2"],
}


@pytest.fixture(autouse=True)
def missing_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine.base.libraries.find_spec", lambda name: None if name == "torch" else find_spec(name))
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "runs"))


def refuse(*words: str) -> str:
    """Return what is said about a command that is refused."""
    result = CliRunner().invoke(app, [*words], prog_name="gputrain")
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.mark.parametrize("name", [name for name, entry in COMMANDS.items() if entry.needs_torch])
def test_command_that_needs_torch_names_the_line_to_type(name: str, tmp_path: Path) -> None:
    said = refuse(*name.split(), *ARGUMENTS[name])
    assert said.startswith(f"error: gputrain {name}: torch ") and ": pip install '.[train]'" in said
    assert says(said, "not-installed", "torch")
    assert not (tmp_path / "runs").exists()


def test_run_without_torch_names_the_line_for_other_programs() -> None:
    assert "gputrain run -- COMMAND" in refuse("run")


def test_preflight_adds_missing_torch_to_the_problems_of_the_config(tmp_path: Path) -> None:
    problem = Problem("optim.lr", "must be above 0", code="out-of-range")
    request = RunRequest(resolve_config("digits").config, tmp_path, "run", problems=(problem,))
    problems = run_preflight(request, lambda wait: ()).problems
    assert problems[0] == problem
    assert has_problem(problems[1:], "not-installed", "", "torch", "pip install '.[train]'")

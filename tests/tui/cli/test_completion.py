"""Completion in shells: bash in a pseudo-terminal, the words that other shells get, and what they cost."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.config.schema import sections
from engine.config.training_sections import BUILTIN_MODELS
from support.gputrain_command import GPUTRAIN, wait_for
from support.screen.pseudo_terminal import PseudoTerminal
from tui.cli.main import app

TAB, SHOW_LINE, CLEAR_LINE = "\t", "\x14", "\x15"
# Modules that take more time to import than the rest of a completion.
HEAVY_MODULES = {"torch", "pydantic", "rich", "textual"}


class Bash:
    """A bash in a pseudo-terminal that completes `gputrain`."""

    def __init__(self, terminal: PseudoTerminal) -> None:
        self._terminal = terminal
        self.type('bind \'set bell-style none\'; bind -x \'"\\C-t": printf "\\n<%s>\\n" "$READLINE_LINE"\'\n')
        self.type('eval "$(gputrain --show-completion bash)"\n')
        # The prompt that follows.
        assert self.type(SHOW_LINE) == ""

    def type(self, keys: str) -> str:
        """Press keys, and return the line that the shell shows for Ctrl-T."""
        start = len(self._terminal.output)
        self._terminal.press(keys)
        if not keys.endswith(SHOW_LINE):
            return ""
        shown: list[str] = []

        def appeared() -> bool:
            self._terminal.read(0.02)
            seen = b"".join(data for _, data in self._terminal.output[start:]).decode()
            shown[:] = re.findall(r"\n<(.*)>\r", seen)
            return bool(shown)

        wait_for(appeared, "the line of the shell")
        return shown[-1]

    def complete(self, line: str) -> str:
        """Return what TAB makes of a line."""
        completed = self.type(f"{line}{TAB}{SHOW_LINE}")
        self._terminal.press(CLEAR_LINE)
        return completed


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with configs and runs, in which the test works."""
    monkeypatch.chdir(tmp_path)
    for name in ("flock-1", "flock-2", "night", "night-1 $(touch hacked)", ".trash"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    for name in ("petals.yaml", "petals.csv", "petals.txt", "my config.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "cats.yml").touch()
    return tmp_path


@pytest.fixture
def bash(work: Path) -> Iterator[Bash]:
    path = f"{Path(GPUTRAIN).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(work), "PS1": "ready> ", "HISTFILE": "/dev/null"}
    with PseudoTerminal(["bash", "--norc", "--noprofile", "-i"], 120, 40, environment) as terminal:
        yield Bash(terminal)


@pytest.mark.expensive("starts gputrain for each line")
def test_bash_completes_words(bash: Bash, work: Path) -> None:
    lines = {
        "gputrain eva": "gputrain evaluate ",
        "gputrain run --headl": "gputrain run --headless ",
        "gputrain run my": r"gputrain run my\ config.yaml ",
        "gputrain run conf": "gputrain run configs/",
        "gputrain run digits optim.nes": "gputrain run digits optim.nesterov=",
        "gputrain run digits data.path=pet": "gputrain run digits data.path=petals.",
        "gputrain run --optimizer=adamw": "gputrain run --optimizer=adamw ",
        "gputrain run --after ni": "gputrain run --after night ",
        "true; gputrain run --after flock-1 --model lin": "true; gputrain run --after flock-1 --model linear ",
    }
    assert {line: bash.complete(line) for line in lines} == lines
    assert not (work / "hacked").exists()


def request(line: str, shell: str = "fish") -> dict[str, str]:
    """Return the variables with which the scripts of the shells ask `gputrain` to complete a line."""
    return {
        "_GPUTRAIN_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }


def completions(line: str, shell: str = "fish") -> Result:
    """Return what the scripts of the shells get for a line, from this process."""
    return CliRunner(env=request(line, shell)).invoke(app, prog_name="gputrain")


def words(line: str) -> list[str]:
    """Return the words that bash and fish get for a line."""
    done = completions(line)
    assert (done.exit_code, done.stderr) == (0, "")
    return [word.partition("\t")[0] for word in done.stdout.splitlines()]


def test_config_completes_presets_files_and_sections(work: Path) -> None:
    found = words("gputrain run ")
    assert found[:2] == ["cifar10", "cifar10-fast"]
    assert found[-len(sections()) :] == [f"{name}." for name in sections()]
    assert {"configs/", "petals.csv", "petals.yaml"} < {*found}
    assert not {"petals.txt", "runs/flock-1"} & {*found}


def test_models_complete_without_catalogs(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "none"))
    assert words("gputrain run --model ") == [*BUILTIN_MODELS]
    assert words("gputrain run model.name=cn") == ["model.name=cnn"]
    assert not (work / "none").exists()


def test_runs_complete_without_heavy_modules(work: Path) -> None:
    line = "gputrain stop "
    assert words(f"{line}fl") == ["flock-1", "flock-2"]
    assert words(line) == ["flock-1", "flock-2", "night", "last"]
    variables = os.environ | request(line) | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([GPUTRAIN], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, words(line))
    trace = done.stderr
    assert not {name.strip().partition(".")[0] for name in re.findall(r"\|([^|\n]+)$", trace, re.M)} & HEAVY_MODULES


@pytest.mark.parametrize(
    ("shell", "shown"),
    [("zsh", '"flock-1"\n"flock-2"'), ("fish", "flock-1\nflock-2\n")],
)
def test_other_shells_get_runs(work: Path, shell: str, shown: str) -> None:
    assert shown in completions("gputrain run --after fl", shell).stdout


@pytest.mark.parametrize(
    "line",
    [
        "gputrain run --runs-dir ~nobody/x --after ",
        "gputrain run /proc/1/fd/",
        "gputrain nonsense ",
        "gputrain run nosuch.key=",
        "gputrain run 'unfinished ",
        "",
    ],
)
def test_completion_of_what_is_not_there_is_silent(work: Path, line: str) -> None:
    (work / "closed").mkdir(mode=0)
    done = completions(line)
    assert done.stderr == "" and (done.exception is None or isinstance(done.exception, SystemExit))
    assert "Traceback" not in done.stdout

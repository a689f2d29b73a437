"""The screen in a real terminal: runs survive it, and it restores the terminal."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.gputrain_command import GPUTRAIN, Gputrain, wait_for
from support.messages import has_problem, says
from support.screen.terminal import LEAVE_ALTERNATE_SCREEN, TIMEOUT_SECONDS, Terminal
from tui.cli.main import app

SCREEN = str(Path(GPUTRAIN).with_name("gputrain-tui"))


def test_tui_exit_restores_terminal(gputrain: Gputrain) -> None:
    for key in ("q", "\x03"):
        terminal = Terminal(gputrain, SCREEN)
        terminal.wait_for("No runs yet")
        terminal.press(key)
        assert terminal.wait_for_end() == 0
        assert terminal.restored()
        terminal.hang_up()


def test_tui_exception_restores_terminal_and_is_reported(gputrain: Gputrain) -> None:
    program = (
        "import tui.screens.monitor as monitor\n"
        "def fail(self): raise RuntimeError('on purpose')\n"
        "monitor.MonitorScreen.action_select = fail\n"
        "from tui import screen; screen()"
    )
    terminal = Terminal(gputrain, sys.executable, "-c", program)
    terminal.wait_for("No runs yet")
    terminal.press(" ")
    assert terminal.wait_for_end() != 0
    assert terminal.restored()
    assert b"on purpose" in terminal.seen
    terminal.hang_up()


def test_run_command_reports_rejected_config_without_opening_tui(gputrain: Gputrain) -> None:
    terminal = Terminal(gputrain, GPUTRAIN, "run", "digits", "--epochs", "none")
    assert terminal.wait_for_end() == 2
    assert says(terminal.seen.decode(), "invalid-value", "error: run.epochs: ", "'none'")
    assert LEAVE_ALTERNATE_SCREEN not in terminal.seen
    terminal.hang_up()
    assert not gputrain.runs.exists()


@pytest.mark.parametrize("redirection", ["2>errors", "2>&-"])
def test_tui_with_redirected_stderr_draws_on_stdout(gputrain: Gputrain, redirection: str) -> None:
    terminal = Terminal(gputrain, "/bin/sh", "-c", f"exec {SCREEN} {redirection}")
    terminal.wait_for("No runs yet")
    terminal.press("q")
    assert terminal.wait_for_end() == 0
    assert terminal.restored()
    terminal.hang_up()
    errors = gputrain.folder / "errors"
    assert not errors.exists() or errors.read_text() == ""


@pytest.fixture
def latin_locale(tmp_path: Path) -> dict[str, str]:
    """The environment of a locale of eight bits."""
    name = "en_US.ISO-8859-1"
    command = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / name)]
    if shutil.which("localedef") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the C library has no sources of locales")
    return {"LOCPATH": str(tmp_path), "LANG": name, "LC_ALL": name}


@pytest.mark.nightly
def test_tui_in_locale_of_eight_bits_draws_in_ascii(gputrain: Gputrain, latin_locale: dict[str, str]) -> None:
    terminal = Terminal(gputrain, SCREEN, "--demo", **latin_locale)
    terminal.wait_for("digits-3")
    terminal.wait_for("Processes")
    terminal.press("q")
    assert terminal.wait_for_end() == 0
    assert b"------" in terminal.seen and terminal.seen.isascii()
    terminal.hang_up()


def test_tui_on_linux_console_draws_in_ascii_and_16_colors(gputrain: Gputrain) -> None:
    terminal = Terminal(gputrain, SCREEN, "--demo", TERM="linux", COLORTERM="truecolor")
    terminal.wait_for("digits-3")
    terminal.wait_for("Processes")
    terminal.press("q")
    assert terminal.wait_for_end() == 0
    assert b"------" in terminal.seen and terminal.seen.isascii()
    assert b"\x1b[3" in terminal.seen and not re.search(rb"[34]8;[25];", terminal.seen)
    terminal.hang_up()


def copied_text(terminal: Terminal) -> str | None:
    """Return what the terminal was last told to put in its clipboard."""
    terminal.read()
    texts = re.findall(rb"\x1b]52;c?;([\w+/=]+)\x07", terminal.seen)
    return base64.b64decode(texts[-1]).decode() if texts else None


def test_tui_copies_through_tmux(gputrain: Gputrain, tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    start = ["tmux", "-S", str(tmp_path / "socket"), "-f", os.devnull, "new-session"]
    terminal = Terminal(gputrain, "/usr/bin/env", *start, SCREEN, "--demo")
    terminal.wait_for("digits-3")
    terminal.press("n")
    terminal.wait_for("ready to start")
    terminal.press("\x19")
    wait_for(lambda: copied_text(terminal) is not None, "the copied text", TIMEOUT_SECONDS)
    assert str(copied_text(terminal)).startswith("gputrain run digits")
    terminal.wait_for("Copied")
    terminal.press("\x03")
    terminal.wait_for_end()
    terminal.hang_up()


def test_tui_without_terminal_reports_error(gputrain: Gputrain) -> None:
    done = subprocess.run(
        [SCREEN],
        env=gputrain.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert says(done.stderr, "no-terminal", "`gputrain ")
    assert done.stderr.count("\n") == 1


def test_run_on_dumb_terminal_is_headless_and_screens_name_commands_that_print(gputrain: Gputrain) -> None:
    started = Terminal(gputrain, GPUTRAIN, "run", "--name", "one", "--", "echo", "loss=1", TERM="dumb")
    assert started.wait_for_end() == 0
    assert b"loss=1" in started.seen and b"\x1b" not in started.seen
    started.hang_up()
    shell = CliRunner(env=dict(gputrain.environment))
    for command, term in (([SCREEN, "one"], "dumb"), ([GPUTRAIN, "watch", "."], "")):
        terminal = Terminal(gputrain, *command, TERM=term)
        assert terminal.wait_for_end() == 2
        message = terminal.seen.decode()
        assert says(message, "no-terminal", f"TERM={term or repr('')};") and message.count("\n") == 1
        terminal.hang_up()
        plain = re.findall("`gputrain ([^`]+)`", message)
        assert plain and all(shell.invoke(app, shlex.split(words)).exit_code == 0 for words in plain)


def fake_logind(folder: Path, kill: str, linger: str) -> None:
    """Create a fake `loginctl` with these answers and a fake `systemd-run` that prints its arguments."""
    script = f'#!/bin/sh\ncase "$*" in *KillUserProcesses*) echo {kill};; *Linger*) echo {linger};; esac\n'
    scope = '#!/bin/sh\necho "scope: $*" >&2\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n'
    for name, text in (("loginctl", script), ("systemd-run", scope)):
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)


def test_launch_run_uses_systemd_scope_or_warns_about_logout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.screens.launcher import launch_run

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    messages = {}
    for kill, linger in (("no", "no"), ("yes", "yes"), ("yes", "no")):
        fake_logind(tmp_path, kill, linger)
        started = launch_run(["run", "--headless", "nosuchpreset"], tmp_path / "runs")
        assert started.process.wait(60) == 2
        messages[kill, linger] = (started.warning, started.output_lines()[0])
        started.output.close()
    assert messages["no", "no"][0] is None and messages["no", "no"][1].startswith("error: nosuchpreset")
    assert messages["yes", "yes"][0] is None and messages["yes", "yes"][1].startswith("scope: --user --scope")
    warning = messages["yes", "no"][0]
    assert warning is not None and has_problem([warning], "not-supported", "", "enable-linger")


def test_tui_screens_never_load_torch(gputrain: Gputrain) -> None:
    terminal = Terminal(gputrain, SCREEN, "--demo")
    terminal.wait_for("digits-3")
    terminal.wait_for("open GPU")
    for keys, text in (
        # Words that are drawn once the screen takes keys.
        ("\t\t\r", "pause"),
        ("\x1b", "open run"),
        ("n", "ready to start"),
        ("\x1b", "open run"),
        ("r", "best val acc"),
    ):
        terminal.seen = b""
        terminal.press(keys)
        terminal.wait_for(text)
    loaded = Path(f"/proc/{terminal.process.pid}/maps").read_text()
    assert "libtorch" not in loaded
    terminal.press("q")
    terminal.wait_for_end()
    terminal.hang_up()

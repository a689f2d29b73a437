"""The way of a copied text through tmux, and what is said where it ends before the clipboard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.messages import has_problem
from tui.terminal.clipboard import clipboard_problem, is_multiplexed, pass_through

TMUX = {"TMUX": "/tmp/tmux-0/default,1,0", "TERM": "tmux-256color"}
SCREEN = {"STY": "1.pts-0.host", "TERM": "screen.xterm-256color"}


@pytest.fixture
def fake_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `tmux` whose terminal has the capabilities in a file, and whose buffer is a file."""
    (tmp_path / "tmux").write_text(
        f'#!/bin/sh\ncase "$*" in\n"load-buffer -w -") cat > {tmp_path}/buffer;;\n'
        f'"show-messages -T") cat {tmp_path}/capabilities;;\n*) exit 1;;\nesac\n'
    )
    (tmp_path / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_pass_through_loads_buffer_of_tmux(fake_tmux: Path) -> None:
    (fake_tmux / "capabilities").write_text(" 192: Ms: (string) \\033]52;%p1%s;%p2%s\\a\n")
    assert pass_through("hé", TMUX) is None
    assert (fake_tmux / "buffer").read_text() == "hé"


def test_pass_through_says_that_terminal_below_tmux_has_no_clipboard(fake_tmux: Path) -> None:
    (fake_tmux / "capabilities").write_text(" 192: Ms: [missing]\n")
    problem = pass_through("text", TMUX)
    assert problem is not None and has_problem([problem], "not-supported", "", "terminal-features", "prefix ]")


def test_pass_through_names_setting_if_tmux_is_old_or_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for environment in (TMUX, SCREEN, {"TERM": "tmux-256color"}):
        problem = pass_through("text", environment)
        assert problem is not None and has_problem([problem], "not-supported", "", "set-clipboard on")


def test_is_multiplexed_knows_multiplexers_by_variable_and_terminal_type() -> None:
    for environment in (TMUX, SCREEN, {"TERM": "screen-256color"}, {"TERM": "tmux"}):
        assert is_multiplexed(environment)
    assert not is_multiplexed({"TERM": "xterm-256color"})


def test_clipboard_problem_names_terminal_without_clipboard_and_text_that_is_no_unicode() -> None:
    problems = [clipboard_problem("/a/path", {"TERM": "linux"}), clipboard_problem("\udcff", {"TERM": "xterm"})]
    assert has_problem([problem for problem in problems if problem], "not-supported", "", "/a/path")
    assert has_problem([problem for problem in problems if problem], "invalid-name", "")
    assert clipboard_problem("/a/path", {"TERM": "xterm"}) is None

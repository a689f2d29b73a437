"""The way of a copied text through tmux, and what is said where it ends before the clipboard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.messages import has_problem
from tui.clipboard import clipboard_problem, is_multiplexed, load_tmux_buffer

TMUX = {"TMUX": "/tmp/tmux-0/default,1,0", "TERM": "tmux-256color"}
SCREEN = {"STY": "1.pts-0.host", "TERM": "screen.xterm-256color"}


def test_load_tmux_buffer_passes_text_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `tmux` of the test has a file as its buffer."""
    (tmp_path / "tmux").write_text(f'#!/bin/sh\n[ "$*" = "load-buffer -w -" ] && cat > {tmp_path}/buffer\n')
    (tmp_path / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert load_tmux_buffer("hé", TMUX) is None
    assert (tmp_path / "buffer").read_text() == "hé"


def test_load_tmux_buffer_says_what_to_do_if_tmux_is_old_or_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for environment in (TMUX, {"TERM": "tmux-256color"}, SCREEN):
        problem = load_tmux_buffer("text", environment)
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

"""Takes a text through tmux to the clipboard of the terminal, which `tui.terminal_app` writes it to.

Programs set the clipboard with OSC 52 (xterm, "Operating System Commands"). tmux keeps the sequence to itself unless
`set-clipboard` is on, which is not its default.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from engine.utils.errors import Problem
from tui.characters import BASIC_TERMS

TMUX_SECONDS = 2.0
MULTIPLEXER_TERMS = ("tmux", "screen")


def clipboard_problem(text: str, environment: Mapping[str, str]) -> Problem | None:
    """Return why a text cannot be copied, if no terminal of this type could; None if it can."""
    if environment.get("TERM") in BASIC_TERMS:
        shown = text if len(text.splitlines()) == 1 else "select it in another terminal"
        return Problem("", f"This terminal has no clipboard: {shown}", code="not-supported")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Problem("", f"{text} is not valid UTF-8, so it cannot be copied", code="invalid-name")
    return None


def is_multiplexed(environment: Mapping[str, str]) -> bool:
    """Whether the terminal is that of tmux or GNU screen, on this host or on that of the user."""
    return bool(
        environment.get("TMUX") or environment.get("STY") or environment.get("TERM", "").startswith(MULTIPLEXER_TERMS)
    )


def load_tmux_buffer(text: str, environment: Mapping[str, str]) -> Problem | None:
    """Let tmux take a text to the clipboard of its terminal, and return what may keep it from there. Waits for tmux."""
    if environment.get("TMUX"):
        command = ["tmux", "load-buffer", "-w", "-"]
        try:
            # Fixed arguments; tmux is on the PATH.
            subprocess.run(command, input=text.encode(), capture_output=True, timeout=TMUX_SECONDS, check=True)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            # An older release.
            pass
        else:
            return None
    reason = "Sent to the clipboard. If it is not there, `tmux set -s set-clipboard on` where tmux runs, and copy again"
    return Problem("", reason, code="not-supported")

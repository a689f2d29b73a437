"""What keeps a text that `tui.terminal.app` writes to the clipboard of the terminal from there; gives it to tmux.

Programs set the clipboard with OSC 52 (xterm, "Operating System Commands"). tmux keeps the sequence to itself unless
`set-clipboard` is on, which is not its default, and GNU screen drops it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from engine.base.errors import Problem
from tui.terminal.characters import BASIC_TERMS

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


def pass_through(text: str, environment: Mapping[str, str]) -> Problem | None:
    """Give tmux the text, if it runs on this host, and return what may keep it from the clipboard. Waits for tmux."""
    reason = "Sent to the clipboard. If it is not there, `tmux set -s set-clipboard on` where tmux runs, and copy again"
    if environment.get("TMUX") and _run_tmux(["load-buffer", "-w", "-"], text) is not None:
        # "Ms" is the capability to set the clipboard.
        if "Ms: (string)" in (_run_tmux(["show-messages", "-T"]) or ""):
            return None
        reason = (
            "Copied into tmux only: paste it there with prefix ]. For the clipboard of this terminal, "
            "`tmux set -as terminal-features ',*:clipboard'` and attach again"
        )
    return Problem("", reason, code="not-supported")


def _run_tmux(arguments: list[str], text: str = "") -> str | None:
    """Run a command of tmux on a text, and return what it prints; None if it fails, as an older release may."""
    try:
        done = subprocess.run(  # noqa: S603 (fixed arguments)
            ["tmux", *arguments],  # noqa: S607 (tmux is on the PATH)
            input=text.encode(),
            capture_output=True,
            timeout=TMUX_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")

"""Scopes of the user's service manager (systemd.scope(5)): processes in one survive the logout of the user."""

from __future__ import annotations

import os
import shutil
import subprocess

LOGINCTL_TIMEOUT_SECONDS = 3.0


def lingering_scope() -> list[str]:
    """Return a command prefix that starts a process in a scope; empty if there is none that survives a logout.

    The service manager itself ends at logout unless lingering is enabled (loginctl(1), enable-linger).
    """
    if shutil.which("systemd-run") and loginctl_enabled("Linger", str(os.getuid())):
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--"]
    return []


def loginctl_enabled(name: str, *user: str) -> bool:
    """Return whether a logind property of the host, or of a user, is `yes`."""
    loginctl = shutil.which("loginctl")
    if loginctl is None:
        return False
    command = [loginctl, "show-user", *user, f"--property={name}", "--value"]
    try:
        result = subprocess.run(  # noqa: S603 (a fixed command)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOGINCTL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.stdout.strip() == "yes"

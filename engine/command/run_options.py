"""Options of `gputrain run` that recreate a stored command, without its working folder.

A sweep starts its trials with them, and the screen offers them when a command is started again.
"""

from __future__ import annotations

import shlex

from engine.command.environment import capture_environment
from engine.command.spec import Program


def run_options(command: Program) -> list[str]:
    """Return the options without those for the environment."""
    options = [] if command.stop_signal == "SIGINT" else ["--stop-signal", command.stop_signal]
    options += [] if command.tty else ["--no-tty"]
    options += ["--on-resume", shlex.join(command.on_resume)] if command.on_resume else []
    for option, values in (("--metrics", command.metrics), ("--parse", command.parse)):
        options += [part for value in values for part in (option, value)]
    return options


def environment_options(command: Program) -> list[str]:
    """Return the options `--env` of a command that keeps its environment: what it would not inherit, and what was
    set."""
    kept = command.environment.keys() - capture_environment(command.environment).keys() - {*command.expanded}
    settings = [*sorted(kept), *(f"{name}={command.environment[name]}" for name in command.expanded)]
    return [part for setting in settings for part in ("--env", setting)]

"""The options of `gputrain run` that make a stored command again."""

from __future__ import annotations

from pathlib import Path

from engine.command.environment import environment_options, run_options
from engine.utils.codec import replace
from support.runs.command_owner import make_command
from tui.cli.run_command import CommandOptions
from tui.cli.run_command import make_command as command_of_options


def test_options_make_the_same_command(tmp_path: Path) -> None:
    command = replace(
        make_command(tmp_path, "fit", "--lr", "1"),
        stop_signal="SIGUSR1",
        tty=False,
        on_resume=("--resume", "a b"),
        metrics=("m",),
        parse=("x (?P<x>.)",),
    )
    options = iter(run_options(command))
    typed: dict[str, list[str]] = {}
    for option in options:
        values = typed.setdefault(option, [])
        if option != "--no-tty":
            values.append(next(options))
    again = command_of_options(
        command.argv,
        CommandOptions(
            cwd=command.cwd,
            stop_signal=typed["--stop-signal"][0],
            no_tty="--no-tty" in typed,
            on_resume=typed["--on-resume"][0],
            metrics=tuple(typed["--metrics"]),
            parse=tuple(typed["--parse"]),
        ),
    )
    same = {"environment": command.environment, "cwd_inode": command.cwd_inode}
    assert replace(again, **same) == command


def test_environment_options_name_what_a_command_would_not_inherit(tmp_path: Path) -> None:
    command = make_command(tmp_path, "fit", environment={"A": "1", "RANK": "3", "B": "2"}, expanded=("B",))
    assert environment_options(command) == ["--env", "RANK", "--env", "B=2"]

"""Why a command is refused: its folder, its program, and what the user set for its run.

`command_run` checks before the run waits for GPUs, and the folder again at each start.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from engine.command.output_metrics import OutputMetrics
from engine.command.spec import Command
from engine.launch.request import RunRequest, check_dependencies
from engine.notify.start import notify_problems
from engine.utils.errors import Problem, collect_problems
from engine.utils.files import file_number, is_folder
from engine.utils.text import printable


def find_command_problems(request: RunRequest) -> list[Problem]:
    """Return every reason to refuse a command that can be found before it waits for GPUs."""
    command, problems = request.command, [*request.problems]
    assert command is not None  # noqa: S101 - see `launch_command`
    if (problem := folder_problem(request, command) or _program_problem(command)) is not None:
        problems.append(problem)
    with collect_problems(problems):
        OutputMetrics(command.parse)
    with collect_problems(problems):
        check_dependencies(request)
    if not request.config.run.resume:
        problems += notify_problems(request.config)
    return problems


def folder_problem(request: RunRequest, command: Command) -> Problem | None:
    """Return why the working folder cannot be used. Whoever can rename it can let the command run other files."""
    try:
        number = file_number(os.stat(command.cwd).st_ino) if is_folder(Path(command.cwd)) else None  # noqa: PTH116
    except OSError:
        number = None
    place = printable(command.cwd)
    if number is None:
        return Problem("--cwd", f"{place} is no folder", code="not-found")
    if request.code_trust.granted or number == command.cwd_inode:
        return None
    advice = "start the command again as a new run, or use this folder with --trust-code"
    return Problem("--cwd", f"another folder has taken the place of {place}", advice, code="untrusted-code")


def _program_problem(command: Command) -> Problem | None:
    program, path = command.argv[0], command.environment.get("PATH", os.defpath)
    if not command.environment:
        # A finished run keeps none, and is refused for that.
        return None
    if "/" in program:
        file = Path(command.cwd) / program
        if not file.exists():
            return Problem(program, "there is no such file", code="command-not-found")
        found = file.is_file() and os.access(file, os.X_OK)
        advice = f"`chmod +x {shlex.quote(program)}`, or name its interpreter, as in python {shlex.quote(program)}"
        return None if found else Problem(program, "is not executable", advice, code="command-not-executable")
    # A relative folder of PATH is relative to the working folder of the command.
    if (
        "{" in program
        or shutil.which(program, path=path) is not None
        or any(not Path(each).is_absolute() for each in path.split(":"))
    ):
        return None
    advice = f"type ./{program}" if (Path(command.cwd) / program).is_file() else ""
    return Problem(program, "there is no such command", advice, code="command-not-found")

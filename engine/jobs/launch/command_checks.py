"""Why a command is refused: its folder, its program, and what the user set for its run.

`program_run` checks before the run waits for GPUs, and the folder again at each start.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path, PurePath

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.files import file_number, is_folder
from engine.base.redaction import redact_argv
from engine.base.text import printable
from engine.jobs.command.devices import has_placeholder
from engine.jobs.command.spec import Program, has_command, read_command
from engine.jobs.launch.request import RunRequest, check_dependencies, limit_problems
from engine.jobs.launch.run_code import copied_command, stored_code
from engine.jobs.launch.survivors import check_survivors
from engine.jobs.notify.run_messages import notify_problems
from engine.runs.folder import RunFolder, RunState
from engine.runs.root import is_run_folder
from engine.runs.run_record import read_run_record
from engine.watch.output_metrics import OutputMetrics

MAX_SHOWN_CHARS = 1000  # of a stored command, in an error


def find_command_problems(request: RunRequest, command: Program) -> list[Problem]:
    """Return every reason to refuse a command that can be found before it waits for GPUs."""
    problems = [*request.problems]
    folder, started = request.resumed_folder, command
    if folder is not None and request.config.run.snapshot:
        started = copied_command(command, stored_code(folder), folder)
    if (problem := folder_problem(request, started) or _program_problem(started)) is not None:
        problems.append(problem)
    # Of a folder of others, the claim says more.
    if folder is not None and is_run_folder(folder.path) and folder.is_own:
        problems += find_other_program(folder, command)
    with collect_problems(problems):
        OutputMetrics(command.parse)
    with collect_problems(problems):
        check_dependencies(request)
    problems += limit_problems(request)
    if not request.config.run.resume:
        problems += notify_problems(request.config)
    return problems


def find_other_program(folder: RunFolder, command: Program) -> list[Problem]:
    """Return why a command cannot go on as the run in a folder: that is a training, or the run of another command."""
    if not has_command(folder):
        reason = "is a training, which cannot go on as a command"
        return [Problem(folder.name, reason, "use a new name with --name", code="name-in-use")]
    try:
        stored = read_command(folder)
    except UsageError:
        # What is missing or damaged is recreated.
        return []
    if stored.has_same_program(command):
        return []
    line, place = shlex.join(redact_argv(stored.argv)), printable(stored.cwd)
    reason = f"is the run of another command: {printable(line[:MAX_SHOWN_CHARS])}, in {place}"
    advice = f"`gputrain resume {folder.name}` starts that one again; a new run needs another --name"
    return [Problem(folder.name, reason, advice, code="name-in-use")]


def check_resumed_command(folder: RunFolder, command: Program) -> Problem | None:
    """Return that a run has nothing left to do. Raises UsageError if the command cannot go on as the run."""
    raise_if_any(find_other_program(folder, command))
    record = read_run_record(folder)
    if record is not None and record.state is RunState.FINISHED:
        reason = f"{folder.name} has already finished; start the command again as a new run"
        return Problem("", reason, code="already-finished")
    check_survivors(folder)
    return None


def folder_problem(request: RunRequest, command: Program) -> Problem | None:
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


def _program_problem(command: Program) -> Problem | None:
    program, file = command.argv[0], Path(command.cwd, command.argv[0])
    sought, path = str(file) if "/" in program else program, command.environment.get("PATH", os.defpath)
    # A finished run keeps no environment, and is refused for that.
    if not command.environment or has_placeholder(program) or shutil.which(sought, path=path) is not None:
        return None
    # A relative folder of PATH is relative to the working folder of the command, where `which` does not search.
    if "/" not in program and not all(Path(folder).is_absolute() for folder in path.split(":")):
        return None
    if "/" in program and file.is_dir():
        return Problem(program, "is a folder and no program", code="command-not-executable")
    if "/" in program and file.exists():
        return Problem(program, "is not executable", f"type {script_line(program)}", code="command-not-executable")
    line = f"./{shlex.quote(program)}" if os.access(file, os.X_OK) else script_line(program)
    advice = f"to run the file of this name, type {line}" if file.is_file() else "correct it, or type its path"
    return Problem(program, "there is no such command", advice, code="command-not-found")


INTERPRETERS = {
    ".py": "python", ".sh": "sh", ".bash": "bash", ".pl": "perl", ".rb": "ruby", ".r": "Rscript", ".R": "Rscript",
    ".jl": "julia",
}  # fmt: skip
"""Programs that run scripts, by the ends of their names."""


def script_line(path: str) -> str:
    """Return the words that run a script, or what to do first if its interpreter is unknown."""
    interpreter, quoted = INTERPRETERS.get(PurePath(path).suffix), shlex.quote(path)
    return (
        f"{interpreter} {quoted}" if interpreter else f"`chmod +x {quoted}` first, or the interpreter before its name"
    )

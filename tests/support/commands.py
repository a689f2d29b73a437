"""Commands that tests start as a supervisor does."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from engine.base.process_table import ProcessId, read_stat
from engine.jobs.command.process_tree import CommandProcess
from support.gputrain_command import wait_for

ROOT = Path(__file__).parents[2]
# A process that has another environment, another session and no living parent.
DAEMON = "env -i setsid sh -c 'sleep 61 & exit' &"


def python(program: str) -> list[str]:
    """Return a command for a Python program that starts fast."""
    return [sys.executable, "-I", "-S", "-c", program]


@contextmanager
def started(
    argv: Sequence[str],
    folder: Path,
    *,
    marker: str = "",
    env: Mapping[str, str] | None = None,
    terminal: int | None = None,
) -> Iterator[CommandProcess]:
    """Start a command in a folder, its output in `output.txt` there unless it has a terminal."""
    output = os.open(folder / "output.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        process = CommandProcess(
            argv,
            cwd=folder,
            env=os.environ if env is None else env,
            stdin=null,
            stdout=output if terminal is None else terminal,
            stderr=output if terminal is None else terminal,
            marker=marker or uuid.uuid4().hex,
        )
        with closing(process):
            yield process
    finally:
        os.close(output)
        os.close(null)


def output_of(folder: Path) -> str:
    """Return what the command in a folder has printed."""
    return (folder / "output.txt").read_text()


def wait_for_output(folder: Path, text: str) -> None:
    """Wait until the command in a folder has printed a text."""
    wait_for(lambda: text in output_of(folder), f"{text!r} in the output")


def names_of(processes: Sequence[ProcessId]) -> list[str]:
    """Return the program names of the processes that have not ended."""
    found = (read_stat(process.pid) for process in processes)
    return [status.name for status in found if status is not None]


def exit_code_of(process: CommandProcess) -> int | None:
    """Wait until a command has ended, and return its exit code."""
    wait_for(lambda: process.poll() is not None, "the end of the command")
    return process.poll()


def wait_for_end(processes: Sequence[ProcessId]) -> None:
    """Wait until all processes have ended."""
    wait_for(lambda: not any(process.is_running() for process in processes), "the end of the processes")


# argv: working folder, marker, script of sh whose processes are as many as its "sleep"s, and the shell.
_SUPERVISOR = f"""
import sys, time
from pathlib import Path
sys.path += {[str(ROOT), str(ROOT / "tests")]!r}
from engine.jobs.command.membership import leave_outer_run
from support.commands import exit_code_of, names_of, started
from support.gputrain_command import wait_for
leave_outer_run()
folder, marker, script = Path(sys.argv[1]), *sys.argv[2:]
with started(["sh", "-c", script], folder, marker=marker) as process:
    names = ["sh", *["sleep"] * script.count("sleep")]
    # A daemon has one more parent at first.
    wait_for(lambda: sorted(names_of(process.members())) == names, "members")
    lines = [f"{{pid}} {{start_ticks}}\\n" for pid, start_ticks in process.members()]
    (folder / "partial").write_text("".join(lines))
    (folder / "partial").rename(folder / "members")
    exit_code_of(process)
"""


def supervisor_command(folder: Path, script: str, marker: str = "") -> list[str]:
    """Return a command that supervises a script of sh: it waits for as many processes as the script has `sleep`s."""
    return [sys.executable, "-c", _SUPERVISOR, str(folder), marker or uuid.uuid4().hex, f"{script}; :"]


def supervised_members(folder: Path) -> list[ProcessId]:
    """Wait until the script of a `supervisor_command` runs, and return its processes."""
    wait_for((folder / "members").exists, "the members of the command")
    return [ProcessId(*map(int, line.split())) for line in (folder / "members").read_text().splitlines()]

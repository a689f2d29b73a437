"""The event with which the session of a command begins, in place of that of a training in `engine.runs.events`, and the
events about the code of any run."""

from __future__ import annotations

from engine.base.codec import Count, Finite, Integer
from engine.base.text import list_names
from engine.runs.events import Event, SessionStarted
from engine.runs.records import CodeSummary


class CommandStarted(SessionStarted, frozen=True, kw_only=True, tag="command_started"):
    """The command of another program begins, in place of `run_started`. Written once per run."""

    command: str
    """The command as a line of a shell, without secrets."""
    cwd: str
    """Working folder of the command."""
    pid: Count
    """Its process."""
    run_id: str
    """ID of this start, which the environment of each of its processes has as GPUTRAIN_RUN_ID."""
    parameters: dict[str, bool | Integer | Finite | str | None]
    """The parameters among its arguments, by dotted keys."""


class CommandResumed(CommandStarted, frozen=True, kw_only=True, tag="command_resumed"):
    """The command begins again, because the run was resumed or the command has failed (`run.max_restarts`). What its
    metric files have of steps that come again is no longer valid."""

    @classmethod
    def of(cls, started: CommandStarted) -> CommandResumed:
        """Return the same start as one that is not the first of its run."""
        return cls(**{name: getattr(started, name) for name in started.__struct_fields__})


SHORT_COMMIT = 10
MAX_EVENT_FILES = 100


class CodeRecorded(Event, frozen=True, kw_only=True, tag="code_recorded"):
    """The run is made, and its code is recorded."""

    code: CodeSummary
    """Commit and fingerprint."""
    changed: list[str]
    """Files that had changed since the commit or were not tracked, at most 100."""
    linked: list[str]
    """What the copy of the code links to rather than contains, at most 100; empty without a copy."""


class CodeChanged(Event, frozen=True, kw_only=True, tag="code_changed"):
    """The run starts, and its code is no longer that with which it was made."""

    message: str
    """What differs, as a clause; "" if nothing differs any more."""
    files: list[str]
    """Files that differ, at most 100."""


def describe_code(code: CodeSummary) -> str:
    """Return the commit, and whether there were changes."""
    commit = f"commit {code.commit[:SHORT_COMMIT]}" if code.commit else "no commit"
    return f"{commit} with changes" if code.is_dirty else commit


def code_line(event: CodeRecorded) -> str:
    """Return the code of a run as a line of the log."""
    line = f"code: {describe_code(event.code)}"
    if event.changed:
        line += f" in {list_names(event.changed)}"
    if event.code.snapshot:
        line += "; runs from a copy"
        line += f" with links to {list_names(event.linked, 10)}" if event.linked else ""
    return line


def change_line(event: CodeChanged) -> str:
    """Return how the code has changed since the run was made, as a line of the log."""
    if not event.message:
        return "the code is again that with which the run was made"
    return f"warning: the code has changed since the run was made: {event.message}"

"""The event with which the session of a command begins, in place of that of a training in `engine.runs.events`."""

from __future__ import annotations

from engine.runs.events import Event
from engine.runs.records import RankDevice
from engine.utils.codec import Count, Finite, Integer


class CommandStarted(Event, frozen=True, kw_only=True, tag="command_started"):
    """The command of another program begins, in place of `run_started`. Written once per run."""

    format: Count
    """Version of the journal format."""
    name: str
    """Name of the run and of its folder."""
    host: str
    """Host name."""
    command: str
    """The command as a line of a shell, without secrets."""
    cwd: str
    """Working folder of the command."""
    pid: Count
    """Its process."""
    run_id: str
    """ID of this start, which the environment of each of its processes has as GPUTRAIN_RUN_ID."""
    devices: list[str]
    """UUID of each of its GPUs and MIG instances, or "cpu"."""
    ranks: list[RankDevice]
    """Its process as one rank, one entry for each device."""
    parameters: dict[str, bool | Integer | Finite | str | None]
    """The parameters among its arguments, by dotted keys."""
    versions: dict[str, str]
    """Version of gputrain and python, by name."""


class CommandResumed(CommandStarted, frozen=True, kw_only=True, tag="command_resumed"):
    """The command begins again, because the run was resumed or the command has failed (`run.max_restarts`). What its
    metric files have of steps that come again is no longer valid."""

    @classmethod
    def of(cls, started: CommandStarted) -> CommandResumed:
        """Return the same start as one that is not the first of its run."""
        return cls(**{name: getattr(started, name) for name in started.__struct_fields__})

"""What the record of a run has of a command. `engine.runs.history` makes the record."""

from __future__ import annotations

from typing import Any

from engine.runs.command_events import CommandStarted
from engine.runs.events import RunFinished
from engine.runs.run_devices import describe_run_devices
from engine.utils.codec import or_none


def command_fields(command: CommandStarted, finished: RunFinished | None) -> dict[str, Any]:
    """Return the fields of a record that tell of the command of another program."""
    return {
        "command": command.command,
        "command_parameters": command.parameters,
        "exit_code": None if finished is None else or_none(finished.exit_code),
        "host": command.host,
        "devices": describe_run_devices(command),
        "gpus": len(set(command.devices) - {"cpu"}),
        "rank_devices": command.ranks,
        "versions": command.versions,
    }

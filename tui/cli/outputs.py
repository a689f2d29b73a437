"""What `--json` prints: one record for each command, and the function that prints it.

`tui.cli.model_outputs` has those of data and models. `engine/JSON.md` lists the fields; `tests/support/record_pages.py`
makes it of these records.
"""

from __future__ import annotations

from typing import Any

import typer

from engine.doctor.leftovers import Leftover
from engine.runs.events import Event
from engine.runs.profile_file import Profile
from engine.runs.run_row import RunValues
from engine.show.awaited_run import AwaitedRun
from engine.utils.codec import (
    FORMAT,
    UNSET,
    Count,
    FileRecord,
    Finite,
    Integer,
    Number,
    Record,
    UnsetType,
    encode,
    encode_indented,
    to_builtins,
)

Values = dict[str, Any]
"""An object whose fields the description of its field names."""


class Output(Record, frozen=True, kw_only=True, tag_field="format", tag=FORMAT):
    """Base class of what a command prints with `--json`: one object, which has a `format`."""


def print_json(output: Output | Record) -> None:
    """Print what `--json` is to print. Not finite numbers are null, and text is escaped to printable ASCII."""
    typer.echo(encode_indented(output))


def json_line(values: Event | FileRecord | Output | Values) -> str:
    """Return one line of a stream of JSON objects. Each line has the `format`, so a reader needs no other one."""
    known = values if isinstance(values, dict) else to_builtins(values)
    return encode({"format": FORMAT} | known).decode()


class RunsOutput(Output, frozen=True, kw_only=True):
    """`gputrain runs --json`"""

    runs: list[RunValues]
    """The runs that match, in the order of the list; the trials of a sweep one by one."""


class WaitOutput(Output, frozen=True, kw_only=True):
    """`gputrain wait RUN... --json`"""

    exit_code: Integer
    """Exit code of the command."""
    runs: list[AwaitedRun]
    """Each run as it was when it ended, met the condition, or the time was up; in the order of the arguments."""


class TrashOutput(Output, frozen=True, kw_only=True):
    """`gputrain runs trash --json`"""

    runs: list[Values]
    """Each run: `name`, `entry` (its name in the trash), `folder`, `deleted_at` in Unix seconds, `files`, `size_bytes`,
    and `checkpoints`."""


class CleanOutput(Output, frozen=True, kw_only=True):
    """`gputrain clean --json`"""

    leftovers: list[Leftover]
    """What can be deleted, by place."""


class SyncOutput(Output, frozen=True, kw_only=True):
    """`gputrain runs sync --json`"""

    syncs: list[Values]
    """Each run: `run`, `state`, `service`, `location`, `steps` (last step that was sent), `sent` (steps of this
    call), `complete`."""


class CompareOutput(Output, frozen=True, kw_only=True):
    """`gputrain compare --json`"""

    runs: list[Values]
    """Each run: `name`, `folder`, `state`, `figures` (metric to value), `problem`, its `code` if that is recorded,
    `formats` of a run of another program, and with `--baseline` the `difference` of each figure."""
    baseline: str | None
    """Name of the run of `--baseline`."""
    config: Values
    """Config key that differs to its value in each run."""
    best: dict[str, list[Count]]
    """Figure to the indices of the best runs."""
    seed_groups: list[Values]
    """Runs that differ in the seed alone: `runs` (indices) and `figures`, each with `mean`, sample standard `deviation`
    and `count`."""
    notes: list[str]
    """What makes the comparison doubtful, in sentences."""


class ReportOutput(Output, frozen=True, kw_only=True):
    """`gputrain report --json`"""

    runs: list[str]
    """Names of the runs."""
    file: str
    """Path that was written."""


class QueueOutput(Output, frozen=True, kw_only=True):
    """`gputrain queue --json`"""

    queue: list[Values]
    """Each waiting run, in its order: `name`, `user`, `uid`, `state`, `place` (null if it does not wait for GPUs only),
    `since` in Unix seconds, `waited_s`, `reason`, `gpus`, `priority`, `share`, `min_free` in bytes (0 for whole GPUs),
    `begin` in Unix seconds (0 for none), and `folder` of your own runs."""


class WatchOutput(Output, frozen=True, kw_only=True):
    """`gputrain watch PATH --json` and `gputrain watch PID --json`"""

    runs: list[Values]
    """Each run of another program: `name`, `folder`, `formats`, `state`, `changed_at`, `parameters`, `metrics` (`name`,
    `key`, `count`, `last_step`, `last_value`) and `problems`."""
    process: Values | UnsetType = UNSET
    """Of a PID: `pid`, `started_at`, `own_run` (folder of the run of gputrain that it belongs to), `is_partly_hidden`,
    `processes`, `gpus`, `open_files` and `logs`."""


class ConfigOutput(Output, frozen=True, kw_only=True):
    """`gputrain config --json`"""

    config: Values
    """The values by section and key; with `--sources` `section.key` to `value` and `source`."""


class ConfigKeysOutput(Output, frozen=True, kw_only=True):
    """`gputrain config describe --json`"""

    keys: Values
    """`section.key` to `description`, `choices`, `other` (a form of value that is no choice) and `default`."""


class SweepsOutput(Output, frozen=True, kw_only=True):
    """`gputrain sweep list --json`"""

    sweeps: list[Values]
    """Each sweep: `name`, `folder`, `state`, `done`, `trials`, `metric`, `best` (value), `best_run`, `started_at`."""


class SweepOutput(Output, frozen=True, kw_only=True):
    """`gputrain sweep show --json`"""

    name: str
    """Name of the sweep."""
    folder: str
    """Its folder."""
    running: bool
    """Whether a controller on this host runs it."""
    settings: Values
    """Its settings, as in `sweep.yaml`."""
    counts: dict[str, Count]
    """State to the number of trials in it."""
    best: Values | None
    """The trial with the best value so far."""
    importances: dict[str, Finite]
    """Config key to its share of the differences, the largest first; empty until there are enough results."""
    trials: tuple[Values, ...]
    """Each trial: `number`, `run`, `state`, `value`, `epoch`, `params`, `preset`, `reason`, `code`, `seconds`,
    `val_loss`."""
    started_at: Number | None
    """Start of trial 0 in Unix seconds."""


class ProfileOutput(Profile, frozen=True, kw_only=True):
    """`gputrain runs profile --json`: The profile, and what it shows."""

    run: str
    """Name of the run."""
    folder: str
    """Folder of the profile."""
    diagnosis: str
    """Where the time goes, in one sentence."""


class ProfileRequestOutput(Output, frozen=True, kw_only=True):
    """`gputrain runs profile --no-wait --json`"""

    run: str
    """Name of the run."""
    request: str
    """Always profile."""
    steps: Count
    """Number of steps to profile."""


class TryParseOutput(Output, frozen=True, kw_only=True):
    """`gputrain run --try-parse FILE --json`"""

    metrics: dict[str, Values]
    """Each metric by its name: `count` of its values, `first_step`, `last_step`, and its `last` value."""
    lines: Count
    """Number of lines."""
    lines_used: Count
    """Number of lines with a metric."""
    problem: str | None
    """Why a part was not read."""


class DoctorOutput(Output, frozen=True, kw_only=True):
    """`gputrain doctor --json`"""

    checks: list[dict[str, str]]
    """Each check: `area`, `name`, `state` (ok, warning or problem), `found`, `advice` and `code`."""


class DeliveriesOutput(Output, frozen=True, kw_only=True):
    """`gputrain doctor --send-test-message --json`"""

    deliveries: list[Values]
    """Each destination: `label`, `service`, `sent`, `reason` and `code`."""

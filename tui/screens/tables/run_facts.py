"""What is known about one run, as names and values: state, results, hardware, owner, labels and checkpoints.

`gputrain runs show` prints them with `fact_lines` of `tui.screens.tables`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from engine.base.errors import UsageError
from engine.base.text import list_names, printable
from engine.base.trust import name_of_user
from engine.base.units import format_age, format_bytes, format_count, format_date
from engine.config.tasks import stored_task_facts
from engine.jobs.command.spec import read_command
from engine.runs.checkpoint_files import list_checkpoints
from engine.runs.claim import read_claim
from engine.runs.command_events import describe_code
from engine.runs.fields import as_text
from engine.runs.folder import ENDED_BADLY, RunFolder, RunState
from engine.runs.keys import quote_key
from engine.runs.metrics import Better, figures_of, format_metric, names_direction, own_metrics
from engine.runs.records import CodeSummary
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunRow


def run_facts(row: RunRow, folder: RunFolder, directions: Mapping[str, Better]) -> dict[str, str]:
    """Return names and printable values; what is not known has no name. `directions` are those of the user's metrics.

    Raises OSError if the run was deleted.
    """
    record, is_live, claim = row.record, row.live, read_claim(folder.owner)
    # Until a run has started, the time is when it was queued.
    begun = "started" if record.devices or row.state == RunState.STARTING else "queued"
    ago = f"{format_age(row.age_seconds)} ago"
    checkpoints = [(path.name, path.stat().st_size) for path in list_checkpoints(folder.checkpoints)]
    facts = {
        "state": row.shown_state,
        "reason" if is_live or RunState(row.state) in ENDED_BADLY else "result": row.message,
        "command": record.command,
        "working folder": _working_folder(folder) if record.command else "",
        "code": "" if record.code is None else _code(record.code),
        "exit code": "" if record.exit_code is None else str(record.exit_code),
        "foreign": f"This run {row.foreign}" if row.foreign else "",
        "problem": record.problem if is_live and record.problem not in row.message else "",
        begun: "" if record.started_at is None else f"{format_date(record.started_at)}, {ago}",
        **{
            metric.label: format_metric(metric, value)
            for metric, value in figures_of(record, directions)
            if value or metric.key != "gpus" or not record.command
        },
        "assumed": _assumed_directions(record, directions),
        "data": _images(record),
        "parameters": ", ".join(f"{key}={as_text(value)}" for key, value in record.command_parameters.items()),
        "limit": "" if record.bottleneck is None else record.bottleneck.message,
        "diverged": record.divergence,
        "devices": record.devices.removeprefix("the "),
        "on CPU": record.cpu_fallback,
        "host": record.host,
        "owner": claim.process if is_live and claim is not None else "",
        "user": name_of_user(folder.path.stat().st_uid),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "folder": str(folder.path),
        "sweep": row.sweep,
        "checkpoints": ", ".join(f"{name} ({format_bytes(size)})" for name, size in checkpoints),
        "tags": " ".join(row.tags),
        "note": " ".join(row.note.split()),
        "archived": "yes" if row.archived else "",
    }
    return {printable(name): printable(value) for name, value in facts.items() if value}


def _assumed_directions(record: RunRecord, directions: Mapping[str, Better]) -> str:
    """Return which of the user's own metrics are taken to be better when higher, although nothing says so."""
    known = {*directions, *stored_task_facts(record.config or {}).metrics}
    assumed = [name for name in own_metrics([record]) if name not in known and not names_direction(name)]
    if not assumed:
        return ""
    change = f"`gputrain runs better {shlex.quote(quote_key(assumed[0]))} low` changes it"
    return f"higher {list_names(assumed, 3)} is better; {change}"


def _images(record: RunRecord) -> str:
    if record.train_images is None:
        return ""
    counts = map(format_count, (record.train_images, record.val_images or 0, record.classes or 0))
    outputs = stored_task_facts(record.config or {}).outputs
    return "{} training images, {} validation images, {} {}".format(*counts, outputs)


def _code(code: CodeSummary) -> str:
    text = describe_code(code) + ("; runs from a copy" if code.snapshot else "")
    return f"{text}; changed since the run was made: {code.changed}" if code.changed else text


def _working_folder(folder: RunFolder) -> str:
    try:
        return read_command(folder).cwd
    except UsageError:
        return ""

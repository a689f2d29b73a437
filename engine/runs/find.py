"""Find a run by what a person types: its name, its folder, or `last`; to read it, also the unique beginning of a name.

Commands and the queue call it. Whether a run is one of gputrain or a foreign one is decided here, and is its type.
`engine.runs.folder` describes the folder that it returns.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from engine.base.errors import UsageError, did_you_mean, file_errors
from engine.base.files import expand_user, is_file
from engine.base.text import printable
from engine.config.run_name import normalize_name
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, SWEEP_FILE, TRUST_OWNER_ADVICE, RunFolder, list_runs
from engine.runs.record_completion import read_listed_record
from engine.runs.root import LAST_RUN, is_listed, is_run_folder
from engine.runs.run_record import read_run_record

if TYPE_CHECKING:
    from engine.watch.folders import ForeignRun

OpenedRun: TypeAlias = "RunFolder | ForeignRun"
"""A run of gputrain, or one that another program has recorded."""


def find_run(root: Path, reference: str, *, trust_owner: bool = False, reads: bool = False) -> RunFolder:
    """Return the run that a name, a path or `last` refers to, identified.

    A caller that only `reads` the run also takes the unique beginning of a name. Whatever changes a run does not: once
    `exp1` is deleted, it would mean `exp10`.

    Only `trust_owner` lets it be a run that other users can change. Raises UsageError if there is none or several, and
    if it is a run of another program.
    """
    found = _find_own_run(root, reference, trust_owner=trust_owner, reads=reads)
    if isinstance(found, RunFolder):
        return found
    if _find_foreign_runs(reference, is_any_enough=True):
        raise foreign_refusal(reference)
    raise found


def find_any_runs(root: Path, reference: str, *, trust_owner: bool = False) -> list[OpenedRun]:
    """Return the run that `find_run` finds for a reader, else all foreign runs below a path.

    Raises UsageError as `find_run` does, and if the beginning of a name is also a path with foreign runs: a run that
    starts later must not change what it means.
    """
    found = _find_own_run(root, reference, trust_owner=trust_owner, reads=True)
    if isinstance(found, RunFolder) and not is_prefix_of(found, reference):
        return [found]
    foreign = _find_foreign_runs(reference)
    if isinstance(found, RunFolder):
        if not foreign:
            return [found]
        reason = f"is the beginning of the run {found.name} and a path with runs of other programs"
        raise UsageError.one(reference, reason, f"type {found.name} or ./{reference}", code="ambiguous-name")
    if not foreign:
        raise found
    return [*foreign]


def is_prefix_of(run: RunFolder, reference: str) -> bool:
    """Whether a run was found by the beginning of its name."""
    if reference == LAST_RUN or "/" in reference:
        return False
    return normalize_name(reference) != normalize_name(run.name)


def _find_foreign_runs(reference: str, *, is_any_enough: bool = False) -> tuple[ForeignRun, ...]:
    """Return the foreign runs below a path. If any is enough, a large tree is searched in part."""
    if reference == LAST_RUN:
        return ()
    # The readers take longer to import than most commands take.
    from engine.watch.folders import SearchLimits, find_runs

    limits = SearchLimits(folders=1000, runs=1) if is_any_enough else SearchLimits()
    return find_runs(expand_user(reference), limits).runs


def foreign_refusal(reference: str) -> UsageError:
    """Return the error that a path has runs of other programs, which a command does not take."""
    path = shlex.quote(reference)
    reason = "has runs of other programs, which gputrain only reads"
    advice = f"use `gputrain watch {path}`, `gputrain compare {path}` or `gputrain report {path}`"
    return UsageError.one(reference, reason, advice, code="recorded-elsewhere")


def run_place(run: OpenedRun) -> tuple[object, ...]:
    """Return what tells a run from all others: its folder, or the files of its logs and its name in them."""
    if isinstance(run, RunFolder):
        return (run.path,)
    return (run.logs[0].run, *(log.files for log in run.logs))


def distinct_runs(runs: Iterable[OpenedRun]) -> list[OpenedRun]:
    """Return each run once. Foreign runs of the same name get as much of their path as tells them apart."""
    found = list({run_place(run): run for run in runs}.values())
    names = Counter(run.name for run in found)
    return [
        run
        if isinstance(run, RunFolder) or names[run.name] == 1
        else replace(run, name=_longer_name(run, [other for other in found if other.name == run.name]))
        for run in found
    ]


def _longer_name(run: ForeignRun, same: Sequence[OpenedRun]) -> str:
    """Return the shortest end of the path of a run that is not that of another one."""
    parts, others = _path_parts(run), [_path_parts(other) for other in same if other is not run]
    for count in range(1 + run.name.count("/"), len(parts)):
        if all(other[-count:] != parts[-count:] for other in others):
            return "/".join(parts[-count:])
    return "/".join(parts)


def _path_parts(run: OpenedRun) -> list[str]:
    """Return the folders above a run and its name."""
    if isinstance(run, RunFolder):
        return printable(str(run.path)).split("/")
    path, name = printable(str(run.folder)), run.name.rpartition("/")[2]
    return (path if path.endswith(f"/{name}") else f"{path}/{name}").split("/")


def _find_own_run(root: Path, reference: str, *, trust_owner: bool, reads: bool) -> RunFolder | UsageError:
    """Return a run of gputrain, identified, or the error that no run is meant. Raises UsageError for other problems."""
    if not reference:
        raise UsageError.one("RUN", "is empty; type the name of a run, its folder, or last", code="missing-value")
    is_name = reference != LAST_RUN and "/" not in reference and is_listed(reference)
    if is_name and is_run_folder(root / reference):
        return _checked(RunFolder(root / reference), trust_owner=trust_owner)
    # Resolve links, so that the run gets its own name in its own runs folder.
    path = Path(os.path.realpath(reference))
    if "/" in reference and is_run_folder(path):
        return _checked(RunFolder(path), trust_owner=trust_owner)
    runs = list_runs(root)
    usable = [run for run in runs if trust_owner or run.is_own]
    if reference == LAST_RUN and usable:
        return _checked(newest_first(usable)[0], trust_owner=trust_owner)
    prefix = normalize_name(reference)
    # A folder that another program made may have the decomposed form.
    same = [run for run in runs if normalize_name(run.name) == prefix]
    if same:
        return _checked(same[0], trust_owner=trust_owner)
    if is_run_folder(path):
        return _checked(RunFolder(path), trust_owner=trust_owner)
    if "/" in reference and not os.path.lexists(path):
        return UsageError.one(reference, "there is no such path", code="not-found")
    if is_name and os.path.lexists(root / reference):
        # Its name must not mean another run.
        if is_file(root / reference / SWEEP_FILE):
            advice = f"use `gputrain sweep show {reference}` or `gputrain sweep stop {reference}`"
            return UsageError.one(reference, "is a sweep, not a run", advice, code="unknown-run")
        return UsageError.one(reference, f"is in {root}, but has no record of a run", code="unknown-run")
    matches = [run for run in usable if normalize_name(run.name).startswith(prefix)]
    if len(matches) == 1 and reads:
        return _checked(matches[0], trust_owner=trust_owner)
    listed = ", ".join(sorted(run.name for run in matches))
    if matches and not reads:
        reason = f"no run of this name in {root}, only {listed}"
        return UsageError.one(reference, reason, "type the whole name", code="unknown-run")
    if matches:
        raise UsageError.one(reference, f"matches several runs: {listed}; type more of the name", code="ambiguous-name")
    if not runs:
        return UsageError.one(reference, f"there are no runs in {root}", OTHER_RUNS_FOLDER_ADVICE, code="unknown-run")
    if not usable:
        return UsageError.one(
            reference,
            f"{root} contains only runs that other users can change",
            TRUST_OWNER_ADVICE,
            code="foreign-writable",
        )
    names = [run.name for run in runs]
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return UsageError.one(
        reference, f"no run of this name in {root}, only {shown}{did_you_mean(reference, names)}", code="unknown-run"
    )


def newest_first(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Return runs in the order of a list: by the start of their latest session, the latest first."""

    def started_at(run: RunFolder) -> float:
        record = read_run_record(run) or read_listed_record(run).record
        return record.started_at or 0.0

    return sorted(runs, key=lambda run: (-started_at(run), run.name))


def _checked(run: RunFolder, *, trust_owner: bool) -> RunFolder:
    """Return the folder, identified. Raises UsageError as `require_own` does, and if it cannot be examined."""
    run.require_own(trust_owner=trust_owner)
    with file_errors(str(run.path), "cannot be opened"):
        return run.identified()

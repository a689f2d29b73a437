"""Find a run by what a person types: its name, the unique beginning of one, its folder, or `last`.

Commands and the queue call it. `engine.runs.folder` describes the folder that it returns.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from engine.config.run_name import normalize_name
from engine.runs.folder import (
    LAST_RUN,
    OTHER_RUNS_FOLDER_ADVICE,
    TRUST_OWNER_ADVICE,
    RunFolder,
    is_run_folder,
    list_runs,
)
from engine.utils.errors import UsageError, did_you_mean


def find_run(root: Path, reference: str, *, trust_owner: bool = False) -> RunFolder:
    """Return the run that a name, a unique prefix of a name, a path or `last` refers to, held for this process.

    Only `trust_owner` lets it be a run that other users can change. Raises UsageError if there is none or several, and
    if `last` could also mean an older run of that name.
    """
    if not reference:
        raise UsageError.one("RUN", "is empty; type the name of a run, its folder, or last", code="missing-value")
    runs = list_runs(root)
    usable = [run for run in runs if trust_owner or run.is_own]
    names = [run.name for run in runs]
    # A folder that another program made may have the decomposed form.
    same = [name for name in names if name == reference] or [
        name for name in names if normalize_name(name) == normalize_name(reference)
    ]
    # Resolve links, so that the run gets its own name in its own runs folder.
    path = Path(os.path.realpath(reference))
    prefix = normalize_name(reference)
    matches = [run for run in usable if normalize_name(run.name).startswith(prefix)]
    if reference == LAST_RUN and usable:
        check_last(root, usable[0].name, [run.name for run in usable])
        return _hold_own(usable[0], trust_owner=trust_owner)
    if same:
        return _hold_own(RunFolder(root / same[0]), trust_owner=trust_owner)
    if is_run_folder(path):
        return _hold_own(RunFolder(path), trust_owner=trust_owner)
    if len(matches) == 1:
        return _hold_own(matches[0], trust_owner=trust_owner)
    if matches:
        listed = ", ".join(sorted(run.name for run in matches))
        raise UsageError.one(reference, f"matches several runs: {listed}; type more of the name", code="ambiguous-name")
    if not runs:
        raise UsageError.one(reference, f"there are no runs in {root}", OTHER_RUNS_FOLDER_ADVICE, code="unknown-run")
    if not usable:
        raise UsageError.one(
            reference,
            f"{root} contains only runs that other users can change",
            TRUST_OWNER_ADVICE,
            code="foreign-writable",
        )
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    raise UsageError.one(
        reference, f"no run of this name in {root}, only {shown}{did_you_mean(reference, names)}", code="unknown-run"
    )


def check_last(root: Path, newest: str, names: Collection[str]) -> None:
    """Raise UsageError if `last` means the newest run, but one of these runs, which is older, has that name.

    No run can get that name now, but a folder can be renamed by hand."""
    if newest != LAST_RUN and LAST_RUN in names:
        path = root / LAST_RUN
        reason = f"means the newest run, {newest}, but an older run has this name"
        advice = f"type {newest} or {path}, and rename the other with `gputrain runs rename {path} NAME`"
        raise UsageError.one(LAST_RUN, reason, advice, code="ambiguous-name")


def _hold_own(run: RunFolder, *, trust_owner: bool) -> RunFolder:
    """Return the folder, held. Raises UsageError as `require_own` does, and if it cannot be opened."""
    try:
        held = run.hold()
    except OSError as error:
        raise UsageError.one(str(run.path), f"cannot be opened: {error.strerror}", code="not-readable") from error
    require_own(held, trust_owner=trust_owner)
    return held


def require_own(run: RunFolder, *, trust_owner: bool) -> None:
    """Raise UsageError if the run contains a link, or if other users can change it and they are not trusted."""
    if (problem := run.link_problem()) is not None:
        raise UsageError.one(
            str(run.path), f"this run {problem}", "replace the link by what it leads to", code="is-link"
        )
    if not trust_owner and (problem := run.foreign_reason()) is not None:
        advice = "remove write permission for others with `chmod -R go-w`, or " if run.is_of_this_user else ""
        raise UsageError.one(str(run.path), f"this run {problem}", advice + TRUST_OWNER_ADVICE, code="foreign-writable")

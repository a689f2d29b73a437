"""The folder of a run that this process owns: created for a new run, or that of the run to resume.

`engine.launch.phases` claims it before the ranks start, and `engine.launch.preflight` checks before that whether the
claim can succeed. `engine.runs.ownership` locks it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from engine.runs.control import consume_requests
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder
from engine.runs.ownership import Ownership, check_not_owned
from engine.runs.root import LAST_RUN, is_run_folder
from engine.utils.errors import UsageError
from engine.utils.host import nearest_existing
from engine.utils.trust import is_shared


@dataclass
class ClaimedRun:
    """A run folder that this process owns. `created_parents` are the parent folders that were created with it."""

    folder: RunFolder
    ownership: Ownership
    is_new: bool
    created_parents: list[Path] = field(default_factory=list)

    def keep(self) -> None:
        """Keep the folder, in which the run has started."""
        self.is_new = False

    def discard(self) -> None:
        """Delete a new run folder and the parents created with it; keep the folder of a resumed run."""
        if not self.is_new or self.folder.is_gone:
            return
        shutil.rmtree(self.folder.path, ignore_errors=True)
        with suppress(OSError):
            for parent in self.created_parents:
                parent.rmdir()


def check_claim(root: Path, name: str | None, *, resume: bool, trust_owner: bool = False) -> RunFolder | None:
    """Check that `claim_run` can succeed, without leaving anything behind. Return the folder of the run to resume.

    Does not watch claims of other hosts. Raises UsageError as `claim_run` does."""
    if name is not None and resume and is_run_folder(root / name):
        folder = RunFolder(root / name)
        folder.require_own(trust_owner=trust_owner)
        check_not_owned(folder)
        return folder
    if name is not None and os.path.lexists(root / name):
        raise _name_in_use(root, name)
    _check_name(name)
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(root)):
            return None
    except OSError as error:
        raise _not_writable(root, error) from error


def claim_run(
    root: Path,
    name: str | None,
    stem: str,
    *,
    resume: bool,
    agents: Sequence[str] = (),
    trust_owner: bool = False,
) -> ClaimedRun:
    """Create and own the folder of a new run, or own the existing one if `resume` is set.

    Without a name the run is called `stem-N`. `agents` identify the run's torchrun agents. `trust_owner` accepts a
    folder that other users can change. Raises UsageError if the name is in use or the folder cannot be written to.
    """
    is_new = name is None or not resume or not is_run_folder(root / name)
    if is_new:
        _check_name(name)
    try:
        new_parents = [parent for parent in (root, *root.parents) if not parent.exists()]
        root.mkdir(parents=True, exist_ok=True)
        path = _create_run_folder(root, name, stem) if is_new else root / str(name)
        try:
            folder = RunFolder(path).identified()
            folder.require_own(trust_owner=trust_owner)
            folder.restrict_umask()
            claimed = ClaimedRun(folder, Ownership(folder, agents), is_new, new_parents)
        except BaseException:
            with suppress(OSError):
                # Only an empty folder, which was created here.
                path.rmdir()
            raise
    except OSError as error:
        raise _not_writable(root, error) from error
    # What an earlier owner may have left: unread requests and incomplete checkpoints.
    for _ in () if claimed.ownership.was_owned else consume_requests(folder.control):
        pass
    for path in folder.checkpoints.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    return claimed


def _create_run_folder(root: Path, name: str | None, stem: str) -> Path:
    """Create a folder in which only this user can write, and in a shared runs folder also read. Raises OSError."""
    mode = 0o700 if is_shared(root.stat()) else 0o755
    for candidate in [name] if name is not None else (f"{stem}-{number}" for number in count(1)):
        with suppress(FileExistsError):
            (root / candidate).mkdir(mode)
            return root / candidate
    raise _name_in_use(root, str(name))


def _check_name(name: str | None) -> None:
    """Raise UsageError if a new run must not have this name."""
    if name == LAST_RUN:
        reason = f"{name} is reserved: it stands for the newest run, as in `gputrain attach {name}`"
        raise UsageError.one("run.name", reason, "use another name with --name", code="invalid-name")


def _name_in_use(root: Path, name: str) -> UsageError:
    if (root / name).is_symlink():
        return UsageError.one(
            "run.name", f"{name} is a symbolic link in {root}", "use a new name with --name", code="name-in-use"
        )
    if not is_run_folder(root / name):
        # Resuming cannot work here.
        reason = f"{name} already exists in {root} and is not a run"
        return UsageError.one("run.name", reason, "use a new name with --name", code="name-in-use")
    advice = f"resume it with --resume, use a new name with --name, or delete it with `gputrain runs delete {name}`"
    return UsageError.one("run.name", f"the run {name} already exists in {root}", advice, code="name-in-use")


def _not_writable(root: Path, error: OSError) -> UsageError:
    return UsageError.one(
        "runs folder", f"{root} cannot be written to: {error.strerror}", OTHER_RUNS_FOLDER_ADVICE, code="not-writable"
    )

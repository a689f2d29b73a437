"""The runs that a run waits for (`queue.after`): resolve their names, and follow them until they have ended.

`place` polls them. The folders are held by a descriptor, so that a renamed run is still the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.base.errors import CodedError, UsageError
from engine.base.files import file_number
from engine.config.queue_section import ANY_END
from engine.jobs.queue.state import Dependency, is_interrupted, read_queue_state
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, RunState, list_runs
from engine.runs.run_row import open_run

KEY = "queue.after"


class DependencyError(CodedError):
    """A run that this one waits for did not finish. The message says so in a sentence."""


def find_dependencies(root: Path, references: Sequence[str], *, trust_owner: bool = False) -> list[Dependency]:
    """Return the runs that values of `queue.after` refer to. Raises UsageError if one does not exist."""
    found = []
    for reference in references:
        name = reference.removesuffix(ANY_END)
        try:
            folder = find_run(root, name, trust_owner=trust_owner)
        except UsageError as error:
            reasons = [f"{problem.location}: {problem.message}" for problem in error.problems]
            raise UsageError.one(KEY, "; ".join(reasons), code=error.problems[0].code) from error
        status = folder.status()
        device, inode = file_number(status.st_dev), file_number(status.st_ino)
        any_end = reference.endswith(ANY_END)
        found.append(Dependency(name=folder.name, any_end=any_end, device=device, inode=inode))
    return found


def check_cycles(name: str, root: Path, dependencies: Sequence[Dependency]) -> None:
    """Raise UsageError if a run would wait for itself, directly or through other waiting runs."""
    unseen, seen = [dependency.name for dependency in dependencies], set[str]()
    while unseen:
        current = unseen.pop()
        if current == name:
            raise UsageError.one(KEY, f"{name} would wait for itself; wait for another run", code="conflict")
        if current not in seen:
            seen.add(current)
            state = read_queue_state(RunFolder(root / current))
            unseen += [dependency.name for dependency in state.after] if state is not None else []


@dataclass
class Predecessor:
    """A run that another one waits for. `folder` is what the last `waits_because` found, None if it no longer exists.

    `is_stopped` is what the last `waits_because` found: the run was stopped, and finishes only if the user resumes it.
    """

    root: Path
    dependency: Dependency
    folder: RunFolder | None = field(default=None, init=False)
    is_stopped: bool = field(default=False, init=False)

    def _find(self) -> None:
        """Find the folder again if it is not where it was: it may have been renamed."""
        if self.folder is not None and not self.folder.is_gone:
            return
        candidates = [RunFolder(self.root / self.dependency.name)]
        with suppress(UsageError):
            candidates += list_runs(self.root)
        self.folder = next(filter(None, (_same_folder(each, self.dependency) for each in candidates)), None)

    def waits_because(self) -> str:
        """Return why the run is still to be waited for, "" if it has ended as it should.

        Raises DependencyError if it will never end so."""
        self.is_stopped = False
        self._find()
        if self.folder is None:
            if self.dependency.any_end:
                return ""
            raise DependencyError(
                f"the run {self.dependency.name}, which this run waited for, was deleted", code="run-deleted"
            )
        row = open_run(self.folder)
        name, state = row.name, row.state
        if row.live:
            return f"after run {name}, which is {state}"
        if state == RunState.INTERRUPTED or is_interrupted(self.folder):
            return f"after run {name}, which was interrupted while it waited; `gputrain queue resume {name}` starts it"
        if state == RunState.FINISHED or self.dependency.any_end:
            return ""
        if state == RunState.STOPPED:
            self.is_stopped = True
            return f"after run {name}, which was stopped; `gputrain resume {name}` continues it"
        cause = f" ({row.record.message})" if row.record.message else ""
        raise DependencyError(
            f"the run {name}, which this run waited for, {_ENDS[state]}{cause}; to start a run however it ends, use "
            f"--after {name}{ANY_END}",
            code="wrong-state",
        )


_ENDS: dict[str, str] = {RunState.FAILED: "failed", RunState.CRASHED: "crashed"}


def _same_folder(folder: RunFolder, dependency: Dependency) -> RunFolder | None:
    """Return the folder, identified, if it is that of the dependency."""
    try:
        found = folder.identified()
        status = found.status()
    except OSError:
        return None
    is_same = (file_number(status.st_dev), file_number(status.st_ino)) == (dependency.device, dependency.inode)
    return found if is_same else None

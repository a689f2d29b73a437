"""The folder of a run on another host: the same one where both hosts share it, else a copy of the code.

`engine.jobs.hosts.placement` calls it. The copy has what `run.snapshot` would copy (`engine.jobs.code.record`), in a
new folder below `~/gputrain-copies` of the host.
"""

from __future__ import annotations

import os
import secrets
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.base.errors import UsageError
from engine.base.text import list_names, printable
from engine.base.units import format_bytes
from engine.jobs.code.git import GitError, Repository, find_repository
from engine.jobs.code.record import CopyPlan, plan_copy, require_repository
from engine.jobs.hosts.channel import run_on

MAX_SHIPPED_BYTES = 1 << 30
SHIP_TIMEOUT_SECONDS = 3600.0
# -o: the files belong to the user of the host, also if that is root.
_UNPACK = (
    'umask 077; mkdir -p "$HOME/gputrain-copies" && folder=$(mktemp -d "$HOME/gputrain-copies/$1-XXXXXX") && '
    'tar -xof - -C "$folder" && echo "$folder"'
)


def shares_folder(host: str, folder: Path) -> bool:
    """Return whether a host sees this folder: it reads what is written here. Raises HostUnreachableError, and
    UsageError if nothing can be written here."""
    token = secrets.token_hex(16)
    try:
        with tempfile.NamedTemporaryFile("w", prefix=".gputrain-", dir=folder) as marker:
            marker.write(token)
            marker.flush()
            # NFS sends a file to its server before it is closed (close-to-open consistency, nfs(5)).
            os.fsync(marker.fileno())
            return run_on(host, ["cat", marker.name]).stdout == token.encode()
    except OSError as error:
        reason = f"{printable(str(folder))} cannot be written ({error.strerror})"
        advice = f"start from a folder of yours, so that gputrain can see whether {host} shares it"
        raise UsageError.one("--on", reason, advice, code="not-writable") from error


@dataclass(frozen=True)
class Shipment:
    """The code around a working folder that is to be copied to a host."""

    repository: Repository
    plan: CopyPlan
    folder: Path

    @property
    def left_out(self) -> str:
        """What stays here, as a clause."""
        return f"; not copied: {list_names(self.plan.linked)}, which --snapshot would link" if self.plan.linked else ""

    def folder_in(self, target: str) -> str:
        """Return the working folder in the copy `target`."""
        return f"{target}/{os.path.relpath(os.path.realpath(self.folder), self.repository.root)}"

    def path_of(self, path: str, target: str) -> str | None:
        """Return where a path of the code is in the copy `target`; None if it is not copied."""
        place = os.path.relpath(os.path.realpath(self.folder / path), self.repository.root)
        is_copied = place == "." or any(f"{name}/".startswith(f"{place}/") for name in self.plan.copied)
        return f"{target}/{place}" if is_copied else None

    def word(self, word: str, target: str) -> str:
        """Return an argument with its absolute path in the copy, also behind `=`."""
        option, sign, path = word.rpartition("=")
        moved = self.path_of(path, target) if path.startswith("/") else None
        return f"{option}{sign}{moved or path}"

    def send(self, host: str) -> str:
        """Copy the code to a new folder on a host, and return its path there.

        Raises HostUnreachableError, and UsageError if it cannot be copied."""
        with tempfile.TemporaryFile() as file:
            try:
                with tarfile.open(fileobj=file, mode="w") as archive:
                    for path in self.plan.copied:
                        archive.add(self.repository.root / path, path, recursive=False)
            except OSError as error:
                raise UsageError.one(
                    str(error.filename), f"cannot be read: {error.strerror}", code="not-readable"
                ) from error
            file.seek(0)
            name = self.repository.root.name or "code"
            answer = run_on(host, ["sh", "-c", _UNPACK, "sh", name], stdin=file, timeout_s=SHIP_TIMEOUT_SECONDS)
        target = answer.stdout.decode(errors="replace").strip()
        if answer.code or not target.startswith("/"):
            reason = f"{host} does not take the copy: {printable(answer.stderr.decode(errors='replace').strip())}"
            raise UsageError.one("--copy", reason, code="not-writable")
        return target


def plan_shipment(folder: Path, runs_dir: Path, files: Sequence[str]) -> Shipment:
    """Return the code to copy. `files` are paths that the run cannot do without. Raises UsageError if it is too much,
    or lacks one of them."""
    try:
        require_repository(folder)
        repository = find_repository(folder)
        assert repository is not None  # noqa: S101 (required above)
        shipment = Shipment(repository, plan_copy(repository, runs_dir), folder)
    except GitError as error:
        raise UsageError.one("--copy", f"{printable(str(folder))} {error}", code=error.code) from error
    except UsageError as error:
        raise UsageError([replace(problem, location="--copy") for problem in error.problems]) from error
    if shipment.plan.size_bytes > MAX_SHIPPED_BYTES:
        reason = f"{shipment.plan} are more than {format_bytes(MAX_SHIPPED_BYTES)}"
        raise UsageError.one("--copy", reason, "add data to .gitignore and copy it yourself", code="too-large")
    for path in files:
        if shipment.path_of(path, "") is None:
            reason = f"is not copied: git ignores it, or it is outside of {printable(str(repository.root))}"
            raise UsageError.one(path, reason, "git add it, or move it there", code="not-found")
    return shipment

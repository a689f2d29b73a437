"""Whether the folder of reservations is hidden from other processes of this host by a mount of its own.

Slurm's job_container/tmpfs, PrivateTmp of systemd and pam_namespace give a job, a service or a session another /tmp.
Runs in two of them do not see each other's reservations. `allocation` warns of it, and `engine.jobs.doctor`.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.base.errors import Problem
from engine.base.files import settings_file
from engine.gpus.reservation_entry import reservations_root

PROCESSES = Path("/proc")
_OCTAL = re.compile(r"\\([0-7]{3})")


def private_folder_problem() -> Problem | None:
    """Return that the folder of reservations is private, None if it is not or if that is unknown."""
    folder = reservations_root().resolve()
    own, first = (_find_mount(folder, process) for process in ("self", "1"))
    if own is None or first is None or own == first:
        return None
    reason = f"GPUs are reserved in {folder}, which only this job, service or session sees: runs outside of it may get"
    advice = f"name a folder that all of them see with GPUTRAIN_RESERVATIONS, or `reservations:` in {settings_file()}"
    return Problem("", f"{reason} the same GPUs", advice, code="private-folder")


def _find_mount(folder: Path, process: str) -> tuple[str, str] | None:
    """Return the device of the file system that a process sees at a folder, and the folder that is mounted from it.

    None if /proc does not tell. The format is that of proc_pid_mountinfo(5).
    """
    try:
        lines = (PROCESSES / process / "mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found, longest = None, 0
    for line in lines:
        _, _, device, root, point, *_ = [*line.split(" "), *[""] * 5]
        mounted = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), point))
        # A later mount hides an earlier one at the same place.
        if folder.is_relative_to(mounted) and len(mounted.parts) >= longest:
            found, longest = (device, root), len(mounted.parts)
    return found

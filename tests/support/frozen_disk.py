"""A disk that does not answer: a process that writes to it is in state D, and SIGKILL does not end it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_frozen_disk = pytest.mark.skipif(
    os.getuid() != 0
    or not Path("/dev/loop-control").exists()
    or any(shutil.which(program) is None for program in ("mkfs.ext4", "fsfreeze", "mount")),
    reason="only root can mount and freeze a file system",
)


@contextmanager
def frozen_disk(folder: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield where a frozen file system is mounted, and what thaws it."""
    image, mount = folder / "disk", folder / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 4 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mount], check=False).returncode != 0:
        pytest.skip("this host mounts no file")

    def thaw() -> None:
        subprocess.run(["fsfreeze", "--unfreeze", mount], check=False, stderr=subprocess.DEVNULL)

    try:
        subprocess.run(["fsfreeze", "--freeze", mount], check=True)
        yield mount, thaw
    finally:
        thaw()
        # The process that was blocked ends.
        subprocess.run(["umount", "--lazy", mount], check=False)

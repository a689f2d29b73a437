"""The folder of reservations: which one is used, and whether other jobs of the host see it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.base.files import settings_file
from engine.gpus import private_mount
from engine.gpus.private_mount import private_folder_problem
from engine.gpus.reservation_entry import reservations_root
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import GPUTRAIN, Gputrain
from support.messages import has_problem, says

ROOT = "27 1 8:1 / / rw - ext4 /dev/sda rw"
PLAIN = "28 27 0:30 / /tmp rw shared:1 - tmpfs tmpfs rw"
OWN_TMPFS = "63 27 0:39 / /tmp rw - tmpfs tmpfs rw"
SLURM = "64 27 8:1 /scratch/77/.77 /tmp rw - ext4 /dev/sda rw"
# The folder is a mount of its own, with a blank in its name.
SHARED = r"65 27 0:50 / /tmp/all\040users rw - nfs4 server:/all rw"


@pytest.mark.parametrize(
    ("own", "first", "is_private"),
    [
        ([ROOT], [ROOT], False),
        ([ROOT, PLAIN], [ROOT, PLAIN], False),
        ([ROOT, PLAIN, OWN_TMPFS], [ROOT, PLAIN], True),
        ([ROOT, SLURM], [ROOT], True),
        ([ROOT, SLURM, SHARED], [ROOT, SHARED], False),
        ([ROOT, SLURM], [], False),
    ],
    ids=["no mount", "same mount", "tmpfs over /tmp", "Slurm", "shared below private", "unknown"],
)
def test_folder_is_private_if_first_process_sees_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str], first: list[str], is_private: bool
) -> None:
    for process, lines in (("self", own), ("1", first)):
        (tmp_path / process).mkdir()
        (tmp_path / process / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(private_mount, "PROCESSES", tmp_path)
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", "/tmp/all users")
    problem = private_folder_problem()
    assert (problem is not None) is is_private
    assert problem is None or has_problem([problem], "private-folder", "", "/tmp/all users", settings_file())


def test_settings_name_folder_below_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUTRAIN_RESERVATIONS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings_file().parent.mkdir()
    settings_file().write_text("reservations: /shared/gpus\n")
    assert reservations_root() == Path("/shared/gpus")
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", "/other")
    assert reservations_root() == Path("/other")
    monkeypatch.delenv("GPUTRAIN_RESERVATIONS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert reservations_root() == Path("/tmp")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a folder")
def test_run_says_that_folder_is_private(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0))
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$GPUTRAIN_RESERVATIONS" && exec "$@"', "sh", GPUTRAIN]
    environment = gputrain.environment | gpu_host.environment
    del environment["CUDA_VISIBLE_DEVICES"]
    command = [*mount, "run", "--headless", "--gpus", "free:1", "--", "true"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=gputrain.folder)
    assert says(done.stderr, "private-folder", "warning: ", environment["GPUTRAIN_RESERVATIONS"])

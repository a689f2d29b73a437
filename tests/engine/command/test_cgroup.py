"""The cgroup of a command: where one can be made, and what it adds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from engine.command.membership import PREFIX, make_cgroup, own_cgroup, remove_cgroup
from support.commands import (
    DAEMON,
    python,
    started,
    supervised_members,
    supervisor_command,
    wait_for_end,
)
from support.gputrain_command import wait_for

# The interpreter may lie in the home of root.
UNPRIVILEGED = [
    "setpriv",
    "--reuid=65534",
    "--clear-groups",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]


def can_make_cgroup() -> bool:
    path = make_cgroup("test")
    if path is not None:
        remove_cgroup(path)
    return path is not None


needs_cgroup = pytest.mark.skipif(not can_make_cgroup(), reason="this user cannot make a cgroup (version 2) here")
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can start processes of another user"
)


@needs_cgroup
def test_processes_are_in_the_cgroup_of_their_run_which_is_removed(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    with started(["sh", "-c", f"{DAEMON} sleep 61; :"], tmp_path, marker=run_id) as process:
        folder = Path(f"{own_cgroup()}/{PREFIX}{run_id}")

        def are_in_cgroup() -> bool:
            # The daemon forks and exits on its way.
            pids = {int(line) for line in (folder / "cgroup.procs").read_text().split()}
            return len(pids) == 3 and pids == {member.pid for member in process.members()}

        wait_for(are_in_cgroup, "the processes")
    assert not folder.exists()


@needs_cgroup
def test_process_that_forks_and_exits_again_and_again_is_killed(tmp_path: Path) -> None:
    # It has another ID before a signal to the last one is sent.
    program = "import os, time\nwhile True:\n    if os.fork(): os._exit(0)\n    time.sleep(0.0005)"
    run_id = uuid.uuid4().hex
    with started(python(program), tmp_path, marker=run_id) as process:
        assert process.wait(30) == 0
        folder = Path(f"{own_cgroup()}/{PREFIX}{run_id}")
        assert "populated 1" in (folder / "cgroup.events").read_text()
        process.end_all(signal.SIGKILL)
        wait_for(lambda: "populated 0" in (folder / "cgroup.events").read_text(), "the end of the processes")


@needs_root
def test_all_processes_end_without_cgroup() -> None:
    script = f"{DAEMON} trap '' TERM; setsid sleep 61 & sleep 61"
    # Another user cannot enter the folder of a test.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        with subprocess.Popen([*UNPRIVILEGED, *supervisor_command(Path(name), script)]) as supervisor:
            members = supervised_members(Path(name))
            assert not any(PREFIX in Path(f"/proc/{member.pid}/cgroup").read_text() for member in members)
            supervisor.kill()
        wait_for_end(members)

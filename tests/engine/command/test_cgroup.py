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

from engine.command.cgroup import PREFIX, make_cgroup, own_cgroup, path_of, remove_cgroup, run_of_cgroup
from engine.command.membership import find_members
from support.commands import (
    DAEMON,
    ROOT,
    output_of,
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
        wait_for(lambda: len(process.members()) == 3, "the processes")
        assert {run_of_cgroup(member.pid) for member in process.members()} == {run_id}
        folder = Path(f"{own_cgroup()}/{PREFIX}{run_id}")
        assert folder.is_dir()
    assert not folder.exists()


@needs_cgroup
def test_process_without_marker_and_parent_is_found_by_its_cgroup(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    with started(["sh", "-c", f"{DAEMON} sleep 61; :"], tmp_path, marker=run_id) as process:
        wait_for(lambda: len(process.members()) == 3, "the processes")
        os.kill(process._keeper.pid, signal.SIGKILL)
        wait_for(lambda: len(find_members(run_id)) == 2, "the end of the command")
        survivors = process.members()
        process.end_all(signal.SIGKILL)
        wait_for_end(survivors)


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


@needs_cgroup
def test_inner_cgroup_belongs_to_the_inner_run(tmp_path: Path) -> None:
    path = make_cgroup("outer")
    assert path is not None
    inner = Path(f"{path}/{PREFIX}inner")
    inner.mkdir()
    try:
        with subprocess.Popen(["sleep", "61"]) as process:
            (inner / "cgroup.procs").write_text(str(process.pid))
            assert (path_of(process.pid) or "").endswith(f"{PREFIX}outer/{PREFIX}inner")
            assert run_of_cgroup(process.pid) == "inner"
            process.kill()
    finally:
        remove_cgroup(path)
    assert not inner.exists()


@needs_cgroup
def test_supervisor_of_an_inner_run_leaves_the_cgroup_of_the_outer_one(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from engine.command import cgroup, membership\n"
        "print(cgroup.own_cgroup())\nmembership.leave_outer_run()\nprint(cgroup.own_cgroup())\n"
    )
    with started(python(program), tmp_path, marker="abcd") as process:
        assert process.wait(30) == 0
    assert output_of(tmp_path).splitlines() == [str(Path(str(own_cgroup())) / f"{PREFIX}abcd"), own_cgroup()]


@needs_cgroup
def test_abandoned_cgroups_are_removed_by_the_next_run() -> None:
    abandoned, new = (make_cgroup(uuid.uuid4().hex) for _ in range(2))
    assert abandoned is not None and new is not None
    try:
        os.utime(abandoned, (0, 0))
        path = make_cgroup(uuid.uuid4().hex)
        assert path is not None
        remove_cgroup(path)
        assert not Path(abandoned).exists() and Path(new).exists()
    finally:
        remove_cgroup(new)


def test_process_outside_has_no_run() -> None:
    assert run_of_cgroup(1) is None


@needs_root
def test_all_processes_end_without_cgroup() -> None:
    script = f"{DAEMON} trap '' TERM; setsid sleep 61 & sleep 61"
    # Another user cannot enter the folder of a test.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        with subprocess.Popen([*UNPRIVILEGED, *supervisor_command(Path(name), script)]) as supervisor:
            members = supervised_members(Path(name))
            assert {run_of_cgroup(member.pid) for member in members} == {None}
            supervisor.kill()
        wait_for_end(members)


def test_failing_service_manager_costs_only_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("loginctl", "echo yes"), ("systemd-run", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("engine.command.process_tree.needs_scope", lambda: True)
    with started(["sh", "-c", "exit 4"], tmp_path) as process:
        assert process.wait(30) == 4


def test_command_starts_in_a_scope_of_the_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = 'echo "$@" > scope\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"'
    for name, script in (("loginctl", "echo yes"), ("systemd-run", run)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("engine.command.process_tree.needs_scope", lambda: True)
    with started(["sh", "-c", "exit 4"], tmp_path, marker="abcd") as process:
        assert process.wait(30) == 4
    options = (tmp_path / "scope").read_text().split(" -- ")[0].split()
    assert {"--user", "--scope", "--property=Delegate=yes", f"--unit={PREFIX}abcd"} <= set(options)

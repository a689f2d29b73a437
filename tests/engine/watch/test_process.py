"""What /proc tells of real processes: the tree, open files, the runs that they write, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.watch.process import ProcessId, find_process_runs, open_files, read_details, read_tree, started_at
from support.gputrain_command import wait_for

HOLD = """
import subprocess, sys
files = [open(name, "a") for name in sys.argv[2:]]
for file in files:
    file.write("step,loss\\n1,0.5\\n")
    file.flush()
child = subprocess.Popen(["sleep", "60"]) if sys.argv[1] == "child" else None
print(flush=True)
sys.stdin.read()
if child:
    child.kill()
    child.wait()
"""


@contextmanager
def held(folder: Path, *names: str, child: bool = False, log: Path | None = None) -> Iterator[ProcessId]:
    """Run a process in a folder that has files open for writing, and maybe a child."""
    command = [sys.executable, "-S", "-c", HOLD, "child" if child else "", *names]
    output = log.open("w") if log is not None else None
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = ProcessId.find(process.pid)
        assert found is not None
        yield found
        process.communicate()
    if output is not None:
        output.close()


def test_tree_has_the_process_and_its_children(tmp_path: Path) -> None:
    with held(tmp_path, child=True) as process:
        # Until it runs its program, the child has no command line.
        wait_for(lambda: read_tree(process).processes[-1].command == "sleep 60", "the program of the child")
        root, child = read_tree(process).processes
    assert (root.id, root.depth, child.parent, child.depth) == (process, 0, process.pid, 1)
    assert root.memory_bytes > 0


def test_ended_process_has_no_tree_and_neither_has_another_one_with_its_id(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        assert process.is_running()
        assert not read_tree(ProcessId(process.pid, process.start_ticks - 1)).processes
    assert not process.is_running() and not read_tree(process).processes


def test_open_files_are_the_regular_ones_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "read").touch()
    os.mkfifo(tmp_path / "pipe")
    descriptors = [os.open(tmp_path / "read", os.O_RDONLY), os.open(tmp_path / "pipe", os.O_RDWR)]
    with (tmp_path / "written").open("w"), (tmp_path / "gone").open("w"):
        (tmp_path / "gone").unlink()
        found = {file.path for file in open_files(os.getpid()) or ()}
    for descriptor in descriptors:
        os.close(descriptor)
    assert {path for path in found if path.is_relative_to(tmp_path)} == {tmp_path / "written"}


def test_run_with_an_open_file_is_that_of_the_process(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "metrics.csv").write_text("step,loss\n1,0.5\n")
    with held(tmp_path, "a/metrics.csv") as process:
        (run,) = find_process_runs(read_tree(process), started_at(process)).runs
    assert run.folder == tmp_path / "a"


def test_run_below_the_working_directory_counts_if_it_was_written_since_the_start(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n1,0.5\n")
    os.utime(tmp_path / "old" / "metrics.csv", (1e9, 1e9))
    with held(tmp_path) as process:
        (tmp_path / "new" / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.4\n")
        (run,) = find_process_runs(read_tree(process), started_at(process)).runs
    assert run.folder == tmp_path / "new"


def test_run_of_gputrain_is_found_for_its_supervisor_and_its_ranks(tmp_path: Path) -> None:
    for name in ("events.jsonl", "owner.json"):
        (tmp_path / name).touch()
    with held(tmp_path, "events.jsonl", child=True) as supervisor:
        tree = read_tree(supervisor)
        rank = ProcessId.find(tree.processes[1].id.pid)
        assert rank is not None
        assert tree.own_run == tmp_path and read_tree(rank).own_run == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_process_of_another_user_shows_command_and_neither_files_nor_environment(tmp_path: Path) -> None:
    with held(tmp_path, "metrics.csv") as process:
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                os.setresuid(65534, 65534, 65534)
                tree, details = read_tree(process), read_details(process.pid)
                is_right = tree.is_hidden and not tree.files and bool(tree.processes[0].command) and not tree.folders
                is_right &= bool(details.command) and (details.cwd, details.environment) == (None, None)
            finally:
                # An exception must not go on as a second test run.
                os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0

"""A command and all that it starts: how it starts and ends, and which processes belong to it. Real processes."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.base.process_table import ProcessId, read_stat
from engine.jobs.command.membership import (
    MARKER,
    PREFIX,
    find_members,
    make_cgroup,
    own_cgroup,
    processes_by_run,
    remove_cgroup,
)
from engine.jobs.command.process_tree import CommandProcess, Step, StopSequence
from support.commands import (
    DAEMON,
    exit_code_of,
    output_of,
    python,
    started,
    supervised_members,
    supervisor_command,
    wait_for_end,
    wait_for_output,
)
from support.gputrain_command import wait_for
from support.messages import raises_problem

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can start processes of another user"
)
OTHER_USER = 65534


def keeper_of(process: CommandProcess) -> int:
    status = read_stat(process.pid)
    assert status is not None
    return status.parent


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)])
def test_poll_returns_exit_code_of_command(tmp_path: Path, script: str, code: int) -> None:
    with started(["sh", "-c", script], tmp_path) as process:
        assert exit_code_of(process) == code
        assert process.poll() == code


def test_command_runs_in_its_folder_with_its_environment_and_marker(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "TEXT": "ä \udcff"}
    with started(["sh", "-c", f'pwd; echo "$TEXT"; echo ${MARKER}'], tmp_path, marker="abc", env=env) as process:
        exit_code_of(process)
    assert (tmp_path / "output.txt").read_bytes() == os.fsencode(f"{tmp_path}\nä \udcff\nabc\n")


def test_descriptor_is_readable_at_the_end_of_the_command(tmp_path: Path) -> None:
    with started(["sleep", "0.1"], tmp_path) as process:
        assert process.poll() is None
        assert select.select([process], [], [], 30)[0]
        assert process.poll() == 0


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("no-such-program", "command-not-found"),
        ("./missing", "command-not-found"),
        ("./text", "command-not-executable"),
        ("./folder", "command-not-executable"),
        ("./no-interpreter", "command-not-executable"),
        ("./no-format", "command-not-executable"),
    ],
)
def test_command_that_cannot_be_executed_raises(tmp_path: Path, program: str, code: str) -> None:
    (tmp_path / "folder").mkdir()
    for name, text, mode in (("text", "", 0o644), ("no-interpreter", "#!/none\n", 0o755), ("no-format", "ls\n", 0o755)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    with raises_problem(code, program), started([program], tmp_path):
        pass


def test_command_in_missing_folder_raises(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with raises_problem("not-started", str(folder)):
        CommandProcess(["true"], cwd=folder, env={}, stdin=0, stdout=1, stderr=2, marker="abc")


def test_command_has_default_signals_whatever_the_supervisor_ignores(tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(["grep", "^Sig[BI]", "/proc/self/status"], tmp_path) as process:
            exit_code_of(process)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert {line.split()[1] for line in output_of(tmp_path).splitlines()} == {"0" * 16}


ESCAPES = {
    "background": "sleep 61 &",
    "session": "setsid sleep 61 &",
    "double fork": "(sleep 61 &)",
    "daemon without environment": DAEMON,
    "200 processes": "for i in $(seq 200); do sleep 61 & done",
}


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES)
def test_no_process_of_the_command_is_left(tmp_path: Path, script: str) -> None:
    count = 200 if "200" in script else 1
    with started(["sh", "-c", script], tmp_path) as process:
        assert exit_code_of(process) == 0
        wait_for(lambda: commands_of(process.members()) == ["sleep"] * count, "the processes")
        members = process.members()
        process.end_all(signal.SIGKILL)
        wait_for_end(members)
        assert process.members() == []


def commands_of(members: list[ProcessId]) -> list[str]:
    return [status.name for member in members if (status := read_stat(member.pid)) is not None]


def test_close_kills_what_is_left(tmp_path: Path) -> None:
    with started(["sh", "-c", "trap '' INT TERM; setsid sleep 61 & wait"], tmp_path) as process:
        wait_for(lambda: "sleep" in commands_of(process.members()), "the processes")
        members = process.members()
    assert len(members) == 2 and not any(member.is_running() for member in members)
    assert process.poll() == -signal.SIGKILL


def test_orphans_are_reaped_without_disturbing_other_children(tmp_path: Path) -> None:
    own = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 3"])
    with started(["sh", "-c", "for i in 1 2 3; do (sleep 0.05 &); done; sleep 0.2; sleep 61"], tmp_path) as process:
        assert own.wait(30) == 3
        wait_for(lambda: len(process.members()) == 2, "the end of the orphans")
        states = subprocess.run(
            ["ps", "--ppid", str(keeper_of(process)), "-o", "stat="], capture_output=True, text=True, check=True
        )
        assert "Z" not in states.stdout


def test_survivors_of_the_keeper_are_found_by_their_marker(tmp_path: Path) -> None:
    with started(["sh", "-c", "setsid sleep 61 & wait"], tmp_path, marker=(run_id := uuid.uuid4().hex)) as process:
        wait_for(lambda: "sleep" in commands_of(process.members()), "the processes")
        os.kill(keeper_of(process), signal.SIGKILL)
        assert exit_code_of(process) == -signal.SIGKILL
        wait_for(lambda: commands_of(find_members(run_id)) == ["sleep"], "the end of the command")
        survivors = process.members()
        assert survivors == find_members(run_id)
        process.end_all(signal.SIGKILL)
        wait_for_end(survivors)


def test_process_without_marker_is_found_by_its_marked_parent() -> None:
    program = "import subprocess; subprocess.run(['sleep', '61'], env={})"
    run_id = uuid.uuid4().hex
    with subprocess.Popen(python(program), env=os.environ | {MARKER: run_id}) as parent:
        wait_for(lambda: "sleep" in commands_of(find_members(run_id)), "the child")
        found = find_members(run_id)
        assert len(found) == 2 and found[0].pid == parent.pid
        for process in reversed(found):
            assert process.send_signal(signal.SIGKILL)


def test_marked_processes_are_listed_by_run() -> None:
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(["sleep", "61"], env={MARKER: run})) for run in (first, second)
        ]
        stack.callback(lambda: [child.kill() for child in children])
        wait_for(lambda: {first, second} <= set(processes_by_run()), "the marked processes")
        found = processes_by_run()
        assert [[process.pid for process in found[run]] for run in (first, second)] == [[c.pid] for c in children]


def test_processes_that_replace_each_other_are_killed(tmp_path: Path) -> None:
    program = (
        "import os\nos.setsid()\nread, write = os.pipe()\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        os.close(write)\n"
        # Until the parent has ended.
        "        os.read(read, 1)\n        os.close(read)\n        read, write = os.pipe()\n        continue\n"
        "    os.wait()\n"
    )
    with started(["sh", "-c", '"$@" & exit 0', "", *python(program)], tmp_path) as process:
        assert exit_code_of(process) == 0
        wait_for(lambda: len(process.members()) == 2, "both processes")
        first = process.members()
        first[0].send_signal(signal.SIGKILL)
        wait_for(lambda: len(set(process.members()) - set(first)) == 1, "the replacement")
        process.end_all(signal.SIGKILL)
        wait_for(lambda: process.members() == [], "the end of the processes")


@needs_root
def test_marker_in_a_process_of_another_user_makes_it_no_member() -> None:
    run_id = uuid.uuid4().hex
    with subprocess.Popen(["sleep", "61"], env={MARKER: run_id}, user=OTHER_USER) as stranger:
        with subprocess.Popen(["sleep", "61"], env={MARKER: run_id}) as own:
            wait_for(lambda: [pid for pid, _ in find_members(run_id)] == [own.pid], "the member")
            own.kill()
        stranger.kill()


def test_signal_reaches_no_later_process_with_the_same_id() -> None:
    with subprocess.Popen(["sleep", "61"]) as later:
        process = ProcessId.find(later.pid)
        assert process is not None
        assert not ProcessId(process.pid, process.start_ticks - 1).send_signal(signal.SIGKILL)
        assert later.poll() is None
        assert process.send_signal(signal.SIGKILL)
        assert later.wait() == -signal.SIGKILL
    assert not process.send_signal(signal.SIGKILL)


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
        assert exit_code_of(process) == 0
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


class Runs(NamedTuple):
    """The command of an outer run, and an inner run with its supervisor and the processes of its command."""

    outer: CommandProcess
    inner_supervisor: ProcessId
    inner_members: list[ProcessId]

    def is_inner_running(self) -> bool:
        return all(process.is_running() for process in (self.inner_supervisor, *self.inner_members))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    for name in ("outer", "inner"):
        (tmp_path / name).mkdir()
    inner = shlex.join(supervisor_command(tmp_path / "inner", f"trap '' INT; {DAEMON} setsid sleep 61 & sleep 61"))
    # In the process group of the outer command.
    script = f"{inner} & echo $! > inner-pid; {DAEMON} sleep 61; :"
    with started(["sh", "-c", script], tmp_path / "outer") as outer:
        members = supervised_members(tmp_path / "inner")
        supervisor = ProcessId.find(int((tmp_path / "outer/inner-pid").read_text()))
        assert supervisor is not None
        yield Runs(outer, supervisor, members)
        supervisor.send_signal(signal.SIGKILL)
        wait_for_end(members)


def test_stop_signal_to_outer_command_does_not_reach_inner_supervisor_in_its_group(runs: Runs) -> None:
    status = read_stat(runs.inner_supervisor.pid)
    assert status is not None and status.group == runs.outer.pid
    runs.outer.signal_group(signal.SIGTERM)
    assert exit_code_of(runs.outer) == -signal.SIGTERM
    assert runs.is_inner_running()


def test_kill_of_outer_command_leaves_inner_run(runs: Runs) -> None:
    members = runs.outer.members()
    runs.outer.end_all(signal.SIGKILL)
    wait_for_end(members)
    runs.outer.close()
    assert runs.is_inner_running()


def test_inner_command_ends_with_its_supervisor_alone(runs: Runs) -> None:
    runs.inner_supervisor.send_signal(signal.SIGKILL)
    wait_for_end(runs.inner_members)
    assert runs.outer.poll() is None
    # While the inner keeper exits, it has no environment.
    wait_for(lambda: len(runs.outer.members()) == 3, "the processes of the outer run")


SHORT = 0.1


def traps(*names: str) -> str:
    """Return the beginning of a script that prints the signals it gets, and ends with none of them."""
    return "".join(f"trap 'echo got {name}' {name}; " for name in names) + "echo ready; "


WAIT = "while :; do sleep 0.02; done"


def wait_until_stopped(stop: StopSequence) -> None:
    wait_for(stop.poll, "the end of the command")


def test_stop_signal_alone_ends_a_command_that_obeys(tmp_path: Path) -> None:
    with started(["sh", "-c", "trap 'echo saved; exit 4' INT; echo ready; " + WAIT], tmp_path) as process:
        stop = StopSequence(process)
        wait_for_output(tmp_path, "ready")
        assert not stop.poll() and stop.step is Step.NONE and stop.seconds_left is None
        stop.request()
        assert stop.seconds_left is not None and stop.seconds_left > 30
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, list(stop.left_behind)) == (4, Step.STOP, [])
    assert output_of(tmp_path) == "ready\nsaved\n"


def test_stop_signal_reaches_the_group_and_no_other_session(tmp_path: Path) -> None:
    script = traps("INT") + f"setsid sh -c '{traps('INT').replace(chr(39), chr(34))} {WAIT}' & " + WAIT
    with started(["sh", "-c", script], tmp_path) as process:
        wait_for(lambda: output_of(tmp_path).count("ready") == 2, "both shells")
        process.signal_group(signal.SIGINT)
        wait_for_output(tmp_path, "got INT")
        time.sleep(0.1)
        assert output_of(tmp_path).count("got INT") == 1


def test_command_that_ignores_sigint_and_sigterm_is_killed(tmp_path: Path) -> None:
    with started(["sh", "-c", traps("INT", "TERM") + WAIT], tmp_path) as process:
        stop = StopSequence(process, grace_s=SHORT)
        wait_for_output(tmp_path, "ready")
        stop.request()
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (-signal.SIGKILL, Step.KILL, [])
    assert output_of(tmp_path).index("got INT") < output_of(tmp_path).index("got TERM")


def test_second_request_kills_at_once(tmp_path: Path) -> None:
    with started(["sh", "-c", traps("INT", "TERM") + WAIT], tmp_path) as process:
        stop = StopSequence(process)
        wait_for_output(tmp_path, "ready")
        stop.request()
        stop.request()
        wait_until_stopped(stop)
        assert (process.poll(), stop.step) == (-signal.SIGKILL, Step.KILL)
    assert "got TERM" not in output_of(tmp_path)


def test_what_the_command_leaves_behind_is_terminated_and_named(tmp_path: Path) -> None:
    with started(["sh", "-c", "setsid sleep 61 & echo $!; sleep 0.1; exit 3"], tmp_path) as process:
        stop = StopSequence(process)
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (3, Step.TERMINATE, [])
    assert stop.left_behind == [f"sleep ({output_of(tmp_path).strip()})"]


def test_what_the_command_leaves_behind_and_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = f"setsid sh -c 'trap \"\" TERM; echo ready; {WAIT}' & while ! grep -q ready output.txt; do :; done"
    with started(["sh", "-c", script], tmp_path) as process:
        stop = StopSequence(process, grace_s=600, leftover_grace_s=SHORT)
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (0, Step.KILL, [])


def test_stopped_process_receives_sigterm(tmp_path: Path) -> None:
    with started(["sh", "-c", "trap 'exit 6' TERM; echo ready; kill -STOP $$; " + WAIT], tmp_path) as process:
        wait_for(lambda: is_stopped(process), "the stop of the command")
        process.end_all(signal.SIGTERM)
        assert exit_code_of(process) == 6


def is_stopped(process: CommandProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"

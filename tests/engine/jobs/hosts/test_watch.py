"""Following hosts: what each says, and that one that fails, floods or lies neither ends nor delays the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.base.process_table import read_stat
from engine.jobs.hosts import channel, watch
from engine.jobs.hosts.reading import HostReading, HostState
from engine.jobs.hosts.watch import LATE_RUNS, NO_RUNS, HostWatch
from engine.runs.run_row import UNKNOWN_STATE
from support.gputrain_command import ROOT
from support.servers.ssh_stand_in import CHANGED_WORDS, HOST_KEY_CHANGED, SshStandIn, run_line, snapshot_line
from tui.cli.console import json_line

DENIED = "echo 'ann@lab: Permission denied (publickey).' >&2; exit 255"
TIMEOUT_SECONDS = 10.0


class Hosts:
    """Hosts, and the watch of them."""

    def __init__(self, ssh: SshStandIn) -> None:
        self.ssh = ssh
        self.watch: HostWatch | None = None

    def follow(self, *names: str, runs_dir: Path | None = None) -> HostWatch:
        self.watch = HostWatch(names, runs_dir)
        return self.watch

    def reading(self, index: int = 0, *, until: Callable[[HostReading], bool]) -> HostReading:
        """Return the reading of a host as soon as it meets a condition."""
        assert self.watch is not None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not until(reading := self.watch.readings()[index]):
            assert time.monotonic() < deadline, reading
            self.watch.wait(0.2)
        return reading

    def first(self, name: str) -> HostReading:
        """Follow one host, and return its first word."""
        self.follow(name)
        return self.reading(until=lambda reading: reading.state is not HostState.CONNECTING)


@pytest.fixture
def hosts(ssh: SshStandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    # The gputrain of these tests is not that of the hosts.
    monkeypatch.setattr(channel.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(watch, "PAUSES_SECONDS", (0.1,))
    made = Hosts(ssh)
    yield made
    if made.watch is not None:
        made.watch.close()


def test_host_with_gputrain_says_gpus_and_runs(hosts: Hosts) -> None:
    news = [run_line("a"), run_line("b"), json_line({"listed": 2}), json_line({"gone": "a"})]
    hosts.ssh.add_gputrain("lab1", "", "".join(f"{line}\n" for line in news))
    hosts.follow("lab1")
    reading = hosts.reading(until=lambda reading: reading.snapshot is not None and len(reading.rows) == 1)
    assert reading.snapshot is not None
    assert (reading.state, reading.has_gputrain, len(reading.snapshot.gpus)) == (HostState.OK, True, 2)
    assert [(row.name, row.folder) for row in reading.rows] == [("lab1:b", "/runs/b")]


def test_noise_of_rc_files_is_no_answer(hosts: Hosts) -> None:
    hosts.ssh.add_gputrain("lab1", "", "", "echo Welcome", 'echo \'{"format":1,"host":"fake"}\'', "echo quota >&2")
    assert hosts.first("lab1").state is HostState.OK


def test_failed_host_keeps_its_words_while_others_answer(hosts: Hosts) -> None:
    hosts.ssh.add_gputrain("lab1")
    hosts.ssh.set_host("rekeyed", HOST_KEY_CHANGED)
    hosts.follow("rekeyed", "lab1")
    hosts.reading(1, until=lambda reading: reading.state is HostState.OK)
    reading = hosts.reading(0, until=lambda reading: reading.state is HostState.DOWN)
    assert (reading.reason, reading.must_ask) == (CHANGED_WORDS, True)


def test_lost_host_recovers(hosts: Hosts) -> None:
    hosts.ssh.set_host("lab1", "echo 'connect to host lab1: Connection refused' >&2", "exit 255")
    assert hosts.first("lab1").reason == "connect to host lab1: Connection refused"
    hosts.ssh.add_gputrain("lab1")
    hosts.reading(until=lambda reading: reading.state is HostState.OK and reading.reason == "")


def test_lost_host_keeps_old_gpus_marked_stale(hosts: Hosts) -> None:
    hosts.ssh.add_gputrain("lab1", program="#!/bin/sh\n[ $1 = runs ] || {{ cat {folder}/gpus; sleep 0.5; exit 1; }}\n")
    hosts.follow("lab1")
    hosts.reading(until=lambda reading: reading.state is HostState.OK)
    hosts.ssh.set_host("lab1", "exit 255")
    reading = hosts.reading(until=lambda reading: reading.state is HostState.DOWN)
    assert reading.snapshot is not None and reading.age_s is not None
    assert {gpu.state for gpu in reading.snapshot.gpus} == {"stale"}


def test_live_run_of_a_lost_host_is_unknown(hosts: Hosts) -> None:
    program = (
        "#!/bin/sh\n[ $1 = gpus ] || {{ cat {folder}/runs; exec sleep 9; }}\ncat {folder}/gpus; sleep 0.5; exit 1\n"
    )
    news = [
        run_line("live"),
        run_line("done").replace('"state":"running"', '"state":"finished"'),
        '{"format":1,"listed":2}',
    ]
    hosts.ssh.add_gputrain("lab1", "", "".join(f"{line}\n" for line in news), program=program)
    hosts.follow("lab1")
    hosts.reading(until=lambda reading: not reading.is_awaited)
    hosts.ssh.set_host("lab1", "exit 255")
    rows = {row.name: row for row in hosts.reading(until=lambda reading: reading.state is HostState.DOWN).rows}
    assert (rows["lab1:live"].state, rows["lab1:done"].state) == (UNKNOWN_STATE, "finished")
    assert rows["lab1:live"].message.startswith("was running at ")


def test_host_that_says_nothing_is_told_with_its_silence(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STALE_SECONDS", 0.2)
    hosts.ssh.set_host("lab1", "sleep 9")
    hosts.follow("lab1")
    reading = hosts.reading(until=lambda reading: bool(reading.reason))
    assert (reading.state, reading.reason) == (HostState.CONNECTING, "no answer for 1 s")


def test_refused_login_waits_for_person(hosts: Hosts) -> None:
    hosts.ssh.set_host("lab1", DENIED)
    assert hosts.first("lab1").must_ask
    time.sleep(0.5)
    assert len(hosts.ssh.calls) == 1
    hosts.ssh.add_gputrain("lab1")
    assert hosts.watch is not None
    hosts.watch.retry("lab1")
    hosts.reading(until=lambda reading: reading.state is HostState.OK and not reading.must_ask)


def test_silent_host_becomes_stale_with_its_age(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STALE_SECONDS", 0.2)
    hosts.ssh.add_gputrain("lab1")
    hosts.follow("lab1")
    reading = hosts.reading(until=lambda reading: reading.state is HostState.STALE and reading.age_s == 1)
    assert reading.snapshot is not None and reading.snapshot.gpus[0].state == "stale"


def test_older_gputrain_still_says_its_gpus(hosts: Hosts) -> None:
    program = "#!/bin/sh\n[ $1 = gpus ] || {{ echo no --watch >&2; exit 2; }}\ncat {folder}/gpus; exec sleep 9\n"
    hosts.ssh.add_gputrain("lab1", program=program)
    hosts.follow("lab1")
    reading = hosts.reading(until=lambda reading: not reading.is_awaited)
    assert (reading.state, reading.reason) == (HostState.OK, f"{NO_RUNS}: no --watch")


def test_runs_folder_that_a_first_run_makes_is_followed(hosts: Hosts, tmp_path: Path) -> None:
    program = (
        "#!/bin/sh\n[ $1 = runs ] || {{ cat {folder}/gpus; exec sleep 9; }}\n"
        """[ -z "$6" ] || cat {folder}/runs; echo '{{"format":1,"listed":0}}'; exec sleep 9\n"""
    )
    hosts.ssh.add_gputrain("lab1", "", f"{run_line('first')}\n", program=program)
    hosts.follow("lab1", runs_dir=tmp_path / "runs")
    assert hosts.reading(until=lambda reading: not reading.is_awaited).rows == ()
    (tmp_path / "runs").mkdir()
    [row] = hosts.reading(until=lambda reading: bool(reading.rows)).rows
    assert row.name == "lab1:first"


def test_end_of_the_list_of_runs_is_told(hosts: Hosts) -> None:
    # Whatever ends it, also in the middle of a line.
    program = (
        '#!/bin/sh\n[ $1 = gpus ] || {{ printf \'{{"format":1,"na\'; exit 0; }}\ncat {folder}/gpus; exec sleep 9\n'
    )
    hosts.ssh.add_gputrain("lab1", program=program)
    hosts.follow("lab1")
    assert hosts.reading(until=lambda reading: not reading.is_awaited).reason.startswith(NO_RUNS)


def test_host_that_lists_no_runs_says_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STALE_SECONDS", 0.3)
    program = "#!/bin/sh\n[ $1 = gpus ] || exec sleep 9\nwhile cat {folder}/gpus; do sleep 0.1; done\n"
    hosts.ssh.add_gputrain("lab1", program=program)
    hosts.follow("lab1")
    assert hosts.reading(until=lambda reading: reading.reason == LATE_RUNS).is_awaited


@pytest.mark.parametrize(("version", "state"), [(2, HostState.OK), (0, HostState.OK), (3, HostState.DOWN)])
def test_next_version_is_understood(hosts: Hosts, version: int, state: HostState) -> None:
    line = snapshot_line().replace('{"format":1', f'{{"format":{version},"later":1', 1)
    hosts.ssh.add_gputrain("lab1", line)
    assert hosts.first("lab1").state is state


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (json.dumps({"format": 1, "gpus": "many"}), "is damaged"),
        (snapshot_line(gpus=65), "more than 64 GPUs"),
        (snapshot_line("x" * 3000), "a text of more than 2000 bytes"),
        ("\x1b[2J", "is damaged"),
        ("[" * 100_000, "is damaged"),
    ],
    ids=["types", "gpus", "text", "escapes", "depth"],
)
def test_answer_of_wrong_kind_is_refused(hosts: Hosts, answer: str, reason: str) -> None:
    hosts.ssh.add_gputrain("lab1", answer)
    reading = hosts.first("lab1")
    assert reading.state is HostState.DOWN and reason in reading.reason


@pytest.mark.parametrize("flood", ["cat /dev/zero", "yes {snapshot}"], ids=["line", "lines"])
def test_flood_ends_connection(hosts: Hosts, flood: str, tmp_path: Path) -> None:
    (tmp_path / "line").write_text(snapshot_line())
    command = flood.format(snapshot=f'"$(cat {tmp_path}/line)"')
    hosts.ssh.add_gputrain("lab1", program=f"#!/bin/sh\n[ $1 = runs ] || exec {command}\n")
    hosts.follow("lab1")
    reading = hosts.reading(until=lambda reading: reading.state is HostState.DOWN)
    assert "more than" in reading.reason


def test_host_without_python_says_so(hosts: Hosts) -> None:
    hosts.ssh.set_host("lab1", "PATH=/nowhere")
    assert hosts.first("lab1").reason == "it has neither gputrain nor python3"


def is_alive(pid: int) -> bool:
    status = read_stat(pid)
    return status is not None and status.state != "Z"


def test_killed_watch_leaves_no_ssh(hosts: Hosts) -> None:
    hosts.ssh.add_gputrain("lab1", "", "", f"echo $$ > {hosts.ssh.folder}/pid")
    program = (
        "from engine.jobs.hosts.watch import HostWatch; "
        "HostWatch(['lab1']).first_readings(); print('ready', flush=True)"
    )
    command = [sys.executable, "-c", f"{program}; import time; time.sleep(100)"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        pid = int((hosts.ssh.folder / "pid").read_text())
        assert is_alive(pid)
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)

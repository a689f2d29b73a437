"""Several hosts over real sshd: they are watched, lost, found again, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.threads import in_background
from engine.base.wait import wait_until
from engine.jobs.hosts.channel import HostUnreachableError, run_on
from engine.jobs.hosts.reading import HostReading, HostState
from engine.jobs.hosts.watch import HostWatch
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import ROOT, isolated_gputrain, read_events
from support.servers.ssh_server import SshServers, make_key

pytestmark = pytest.mark.nightly
TIMEOUT_SECONDS = 30.0
RECOVERY_SECONDS = 10.0


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServers]:
    made = SshServers(tmp_path / "ssh", monkeypatch)
    made.add("lab1")
    made.add("lab2")
    yield made
    made.close()


@pytest.fixture
def watch(servers: SshServers) -> Iterator[HostWatch]:
    made = HostWatch(["lab1", "lab2"])
    assert {reading.state for reading in made.first_readings(TIMEOUT_SECONDS)} == {HostState.OK}
    yield made
    made.close()


def await_state(watch: HostWatch, state: HostState, timeout_s: float = TIMEOUT_SECONDS) -> HostReading:
    """Return the reading of lab1 as soon as it has a state."""
    assert wait_until(lambda: watch.readings()[0].state is state, timeout_s), watch.readings()[0]
    return watch.readings()[0]


def test_lost_host_is_found_again_while_other_answers(servers: SshServers, watch: HostWatch) -> None:
    servers.stop("lab1")
    await_state(watch, HostState.DOWN)
    assert watch.readings()[1].state is HostState.OK
    servers.start("lab1")
    await_state(watch, HostState.OK, RECOVERY_SECONDS)


def test_commands_share_connection_of_watch(servers: SshServers, watch: HostWatch) -> None:
    before = servers.log("lab1").read_text().count("Accepted publickey")
    assert run_on("lab1", ["echo", "here"]).stdout == b"here\n"
    assert servers.log("lab1").read_text().count("Accepted publickey") == before == 1


def test_command_survives_the_watch_whose_connection_it_shares(servers: SshServers, watch: HostWatch) -> None:
    answer = in_background(lambda: run_on("lab1", ["sh", "-c", f"touch {servers.folder}/here; sleep 2; echo there"]))
    assert wait_until((servers.folder / "here").exists, TIMEOUT_SECONDS)
    watch.close()
    assert answer.result().stdout == b"there\n"


def test_changed_and_unknown_host_keys_are_told(servers: SshServers, watch: HostWatch) -> None:
    servers.stop("lab1")
    make_key(servers.folder / "lab1-key")
    servers.start("lab1")
    assert wait_until(lambda: watch.readings()[0].must_ask, TIMEOUT_SECONDS)
    assert "IDENTIFICATION HAS CHANGED" in watch.readings()[0].reason
    servers.distrust("lab1")
    assert wait_until(lambda: "CHANGED" not in watch.readings()[0].reason, TIMEOUT_SECONDS)
    assert watch.readings()[0].must_ask
    servers.trust("lab1")
    await_state(watch, HostState.OK, RECOVERY_SECONDS)


def test_refused_key_needs_person(servers: SshServers) -> None:
    servers.stop("lab1")
    servers.start("lab1", "AuthorizedKeysFile none")
    with pytest.raises(HostUnreachableError, match="Permission denied"):
        run_on("lab1", ["true"])


def test_closed_watch_leaves_no_process_and_no_socket(servers: SshServers) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; from engine.jobs.hosts.watch import HostWatch\n"
         "w = HostWatch(['lab1', 'lab2']); "
         "print(w.first_readings()[0].state, flush=True); sys.stdin.read(); w.close()"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ok\n"
        assert len(sockets(servers)) == 2
    assert wait_until(lambda: not sockets(servers) and not sessions(servers), TIMEOUT_SECONDS)


def test_killed_watch_leaves_no_process(servers: SshServers) -> None:
    program = (
        "import time; from engine.jobs.hosts.watch import HostWatch; w = HostWatch(['lab1']); w.first_readings(); "
    )
    with subprocess.Popen([sys.executable, "-c", f"{program} time.sleep(100)"], cwd=ROOT) as process:
        assert wait_until(lambda: sessions(servers), TIMEOUT_SECONDS)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not sessions(servers), TIMEOUT_SECONDS)


def test_two_runs_at_once_share_last_gpu_in_turn(servers: SshServers, gpu_host: FakeGpuHost, tmp_path: Path) -> None:
    gpu_host.set_scene(gpu_line(0, util=0, used=0))
    variables = " ".join(f"{name}={value}" for name, value in gpu_host.environment.items())
    servers.stop("lab1")
    servers.start("lab1", f"SetEnv PATH={os.environ['PATH']} {variables}")
    for gputrain in isolated_gputrain(tmp_path / "work"):
        line = ("run", "--on", "any:lab2,lab1", "--gpus", "free:1", "--", "sleep", "5")
        started = [gputrain.start(*line) for _ in range(2)]
        names = {process.communicate(timeout=100)[0] for process in started}
        assert names == {"lab1:sleep-1\n", "lab1:sleep-2\n"}
        assert gputrain("wait", "lab1:sleep-1", "lab1:sleep-2").returncode == 0
        events = [event["type"] for name in ("sleep-1", "sleep-2") for event in read_events(gputrain.runs / name)]
        assert events.count("waiting") == 1


def sockets(servers: SshServers) -> list[Path]:
    return list(servers.runtime.glob("gputrain/*"))


def sessions(servers: SshServers) -> list[str]:
    """Return the processes of ssh, and of gputrain on the hosts."""
    listed = subprocess.run(["pgrep", "-af", str(servers.folder)], capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if "/ssh -F" in line]

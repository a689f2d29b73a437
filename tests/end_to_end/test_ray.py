"""A real Ray of two nodes with one CPU each on this host: a training loses a worker and a node, and a command runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from engine.runs.batch.ray import Ray
from support.gputrain_command import Gputrain, shown_state, step_losses, wait_for
from support.ports import free_ports

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'ray[train,default]'"),
]
# Ray starts many processes that import torch.
START_SECONDS = 300.0


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


class Cluster:
    """Nodes of one CPU each; the first is the head."""

    def __init__(self, gputrain: Gputrain, folder: Path) -> None:
        self._gputrain, self._folder = gputrain, folder
        self.nodes: list[subprocess.Popen[str]] = []
        self._port, self._dashboard, self._client = free_ports(3)

    @property
    def place(self) -> str:
        return f"ray:127.0.0.1:{self._dashboard}"

    def add_node(self) -> None:
        head = ["--head", f"--port={self._port}", f"--dashboard-port={self._dashboard}", "--include-dashboard=true"]
        head += [f"--temp-dir={self._folder}", f"--ray-client-server-port={self._client}"]
        options = [f"--address=127.0.0.1:{self._port}"] if self.nodes else head
        ray = Path(sys.executable).with_name("ray")
        argv = [str(ray), "start", "--block", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"]
        argv += ["--disable-usage-stats", "--dashboard-agent-listen-port=0", *options]
        self.nodes.append(self._gputrain.start(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for(lambda: self._count() == len(self.nodes), f"{len(self.nodes)} nodes", START_SECONDS)

    def end_node(self) -> None:
        """Kill the raylet of the last node, as if the node lost its power."""
        node = self.nodes.pop()
        processes = psutil.Process(node.pid).children(recursive=True)
        [raylet] = [each for each in processes if each.name() == "raylet"]
        raylet.kill()
        kill([psutil.Process(node.pid), *processes])

    def close(self) -> None:
        """End all processes. The test cannot find some of them by their environment, which Ray has overwritten."""
        for node in self.nodes:
            process = psutil.Process(node.pid)
            kill([process, *process.children(recursive=True)])

    def worker(self, rank: int) -> psutil.Process:
        """Return the worker of Ray that has started a rank."""
        for process in self._gputrain.processes():
            if process.environ().get("RANK") == str(rank) and "--headless" in process.cmdline():
                parent = process.parent()
                assert parent is not None
                return parent
        raise AssertionError(f"rank {rank} does not run")

    def _count(self) -> int:
        query = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        with suppress(OSError), urlopen(f"http://127.0.0.1:{self._dashboard}/api/v0/nodes?{query}") as answer:
            return len(json.load(answer)["data"]["result"]["result"])
        return 0


@pytest.fixture
def cluster(gputrain: Gputrain) -> Iterator[Cluster]:
    # A path of pytest is too long for sockets.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    gputrain.environment["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(gputrain, folder)
    try:
        cluster.add_node()
        cluster.add_node()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def submit(gputrain: Gputrain, cluster: Cluster, *words: str) -> None:
    done = gputrain("run", "--on", cluster.place, "--ngpu", "0", *words)
    assert done.returncode == 0, done.stderr


def test_training_that_loses_a_worker_and_a_node_goes_on_to_the_same_losses(
    cluster: Cluster, gputrain: Gputrain
) -> None:
    submit(gputrain, cluster, "digits", "--nodes", "2", "--ranks", "1", "--epochs", "40", "--name", "a")
    run = gputrain.runs / "a"
    wait_for((run / "checkpoints/last.pt").exists, "a checkpoint", START_SECONDS)
    cluster.worker(1).kill()
    wait_for(lambda: "Ray lost rank 1" in (run / "job.log").read_text(), "the loss of a worker", START_SECONDS)
    gputrain.wait_for_event("a", "run_resumed")
    cluster.end_node()
    waiting = ("waiting", "requeued, pending (NO_RESOURCES, 2 workers)")
    wait_for(lambda: shown_state(gputrain, "a") == waiting, "the loss of a node", START_SECONDS)
    cluster.add_node()
    assert gputrain("wait", "a", "--timeout", "3min").returncode == 0
    words = ("digits", "--headless", "--gpus", "cpu", "--ranks", "2", "--epochs", "40", "--name", "b")
    assert gputrain("run", *words).returncode == 0
    assert step_losses(run) == step_losses(gputrain.runs / "b")
    assert not [each for each in gputrain.processes() if "--headless" in each.cmdline()]
    assert not (run / "ray").exists()


def test_stop_of_ray_saves_a_checkpoint_and_a_command_runs(cluster: Cluster, gputrain: Gputrain) -> None:
    submit(gputrain, cluster, "digits", "--ranks", "2", "--epochs", "5000", "--name", "a")
    gputrain.wait_for_event("a", "epoch")
    job = json.loads((gputrain.runs / "a/job.json").read_text())["id"]
    Ray(cluster.place.partition(":")[2]).cancel(job)
    wait_for(lambda: shown_state(gputrain, "a")[0] == "stopped", "the end", START_SECONDS)
    assert (gputrain.runs / "a/checkpoints/last.pt").exists()
    submit(gputrain, cluster, "--name", "c", "--", "sh", "-c", "echo $GPUTRAIN_TEST; exit 7")
    assert gputrain("wait", "c", "--timeout", "3min").returncode == 1
    assert str(gputrain.folder) in (gputrain.runs / "c/log.txt").read_text()

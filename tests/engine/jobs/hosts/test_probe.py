"""The probe of a host without gputrain: an old Python, nvidia-smi in a loop, and who holds the GPUs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.base.process import user_name
from engine.gpus.snapshot import Snapshot
from engine.jobs.hosts import probe
from engine.jobs.hosts.reading import parse_snapshot

SOURCE = Path(probe.__file__)
GPU = "GPU-1, NVIDIA A100-SXM4-80GB, 00000000:01:00.0, 97, 61000, 81920, 41, [N/A], 400.00, Disabled, 550.54"
NVIDIA_SMI = """\
#!/bin/sh
echo $$ >> {folder}/started
trap 'exit' TERM
case "$1" in
*query-gpu*) printf '%s' '{gpus}';;
*) printf '%s' '{processes}';;
esac
sleep 100 & wait
"""


@contextmanager
def probing(folder: Path, gpus: str, processes: str = "") -> Iterator[subprocess.Popen[bytes]]:
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(folder=folder, gpus=gpus, processes=processes))
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:/usr/bin:/bin"}
    with SOURCE.open("rb") as source:
        process = subprocess.Popen([sys.executable, "-"], stdin=source, stdout=subprocess.PIPE, env=environment)
    with process:
        yield process
        process.kill()


def first_sample(process: subprocess.Popen[bytes]) -> Snapshot:
    assert process.stdout is not None
    return parse_snapshot(process.stdout.readline())


def test_probe_is_program_of_python_3_6() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"ctypes", "json", "os", "pwd", "select", "signal", "subprocess", "time"}
    newer = {"capture_output", "text"}
    assert not newer & {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}


def test_probe_says_gpus_and_who_holds_them(tmp_path: Path) -> None:
    with probing(tmp_path, f"0, {GPU}\n", f"GPU-1, {os.getpid()}, 60000\n") as process:
        snapshot = first_sample(process)
    [gpu] = snapshot.gpus
    assert (gpu.uuid, gpu.util.value, gpu.memory_total.value) == ("GPU-1", 97, 81920 << 20)
    assert (gpu.power.value, gpu.power.reason) == (None, "N/A")
    [held] = gpu.processes.value or ()
    assert (held.user.value, held.gpu_memory.value) == (user_name(), 60000 << 20)
    assert "python" in (held.command.value or "")


@pytest.mark.parametrize(
    "words", ["Failed to initialize NVML: Driver/library version mismatch", "No devices were found"]
)
def test_probe_says_why_driver_fails(tmp_path: Path, words: str) -> None:
    with probing(tmp_path, f"{words}\n") as process:
        assert first_sample(process).error == words


def test_probe_says_that_there_is_no_nvidia_smi(tmp_path: Path) -> None:
    done = subprocess.run(
        ["timeout", "2", sys.executable, str(SOURCE)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert parse_snapshot(done.stdout).error == "nvidia-smi cannot be started: No such file or directory"


def test_probe_starts_nvidia_smi_once_and_ends_with_its_reader(tmp_path: Path) -> None:
    with probing(tmp_path, f"0, {GPU}\n") as process:
        first_sample(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(10) == 0
    pids = [int(line) for line in (tmp_path / "started").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)

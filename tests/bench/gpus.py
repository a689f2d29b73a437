"""Benchmark `gputrain gpus` on eight GPUs: `python tests/bench/gpus.py [ROUNDS] [FOLDER OF nvitop AND gpustat]`.

Prints the median wall time of the whole process, compared with nvitop and gpustat if they are installed, and the CPU
time of the GPU sampler. The commands alternate; all use the fake driver (`fake_nvml.c`).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.gpu.fake_gpu_host import FakeGpuHost, build_fake_driver, eight_gpu_lines

SAMPLED_SECONDS = 30.0


def wall_seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def sampler_cpu_share(environment: dict[str, str]) -> float:
    """CPU time of the sampler after startup, at one sample per second, as a share of wall time."""
    command = [sys.executable, "-P", "-c", "from engine.gpus.sampler import main; main()", "{}"]
    sampler = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sampler.stdout is not None
    assert sampler.stdin is not None
    sampler.stdout.readline()
    process = psutil.Process(sampler.pid)
    start_times, start = process.cpu_times(), time.monotonic()
    while time.monotonic() - start < SAMPLED_SECONDS:
        sampler.stdout.readline()
    end_times = process.cpu_times()
    share = (end_times.user + end_times.system - start_times.user - start_times.system) / (time.monotonic() - start)
    sampler.stdin.close()
    sampler.wait()
    return share


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    search = os.pathsep.join([str(Path(sys.executable).parent), *sys.argv[2:], os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        host = FakeGpuHost(Path(folder), build_fake_driver(Path(folder)))
        host.set_scene(eight_gpu_lines(), [f"process {index} {os.getpid()} 60000 compute" for index in range(8)])
        environment = {**os.environ, **host.environment}
        commands = {"gputrain": ["gpus", "--json"], "gpustat": ["--json"], "nvitop": ["-1"]}
        paths = {name: shutil.which(name, path=search) for name in commands}
        times: dict[str, list[float]] = {name: [] for name, path in paths.items() if path}
        for round_number in range(rounds + 1):
            for name, timings in times.items():
                seconds = wall_seconds([str(paths[name]), *commands[name]], environment)
                # The first round warms up caches.
                timings += [seconds] if round_number else []
        for name, timings in times.items():
            spread = f"{min(timings):.3f} to {max(timings):.3f}, {rounds} rounds"
            print(f"{name:<9} {statistics.median(timings):.3f} s   ({spread})")
        print(f"sampler   {sampler_cpu_share(environment):.2%} of one core at one sample per second")


if __name__ == "__main__":
    main()

"""Benchmark the time to the first optimizer step: `python tests/bench/start.py [ROUNDS]`.

Measures from the start of the command, with two ranks on the CPU, for both values of `device.start_method` and for a
minimal DDP script that spawns its ranks. The three alternate; medians are printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MINIMAL_SCRIPT = """
import socket, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    if rank == 0:
        print(time.time(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
"""


def minimal_script_seconds(folder: Path) -> float:
    script = folder / "minimal.py"
    script.write_text(MINIMAL_SCRIPT)
    start = time.time()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return float(done.stdout) - start


def gputrain_seconds(folder: Path, start_method: str) -> float:
    """Seconds to the first `step` event. It is sent one step after the step it describes, so this is an upper bound."""
    command = [Path(sys.executable).with_name("gputrain"), "run", "--headless", "--json", "digits", "--epochs", "1"]
    start = time.time()
    options = ["--runs-dir", str(folder / "runs"), "--gpus", "cpu", "run.log_every=1"]
    done = subprocess.run(
        [*command, *options, f"device.start_method={start_method}"], capture_output=True, text=True, check=True
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return float(next(event["time"] for event in events if event["type"] == "step")) - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        candidates: dict[str, Callable[[], float]] = {
            "minimal script": lambda: minimal_script_seconds(folder),
            "gputrain fork": lambda: gputrain_seconds(folder, "fork"),
            "gputrain spawn": lambda: gputrain_seconds(folder, "spawn"),
        }
        for measure in candidates.values():
            measure()
        seconds: dict[str, list[float]] = {label: [] for label in candidates}
        for number in range(rounds):
            for label, measure in candidates.items():
                seconds[label].append(measure())
            values = ", ".join(f"{label} {times[-1]:.2f} s" for label, times in seconds.items())
            print(f"round {number + 1}: {values}", flush=True)
    reference = statistics.median(seconds["minimal script"])
    for label, times in seconds.items():
        print(f"median {label}: {statistics.median(times):.2f} s, ratio {statistics.median(times) / reference:.2f}")


if __name__ == "__main__":
    main()

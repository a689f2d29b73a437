"""Benchmark the time to the first optimizer step: `python tests/bench/start.py [PAIRS]`.

Measures from the start of the command, with two spawned ranks on the CPU, and compares with a minimal DDP script. The
two alternate; medians are printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
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


def gputrain_seconds(folder: Path) -> float:
    """Seconds to the first `step` event. It is sent one step after the step it describes, so this is an upper bound."""
    command = [Path(sys.executable).with_name("gputrain"), "run", "--headless", "--json", "digits", "--epochs", "1"]
    start = time.time()
    options = ["--runs-dir", str(folder / "runs"), "--gpus", "cpu", "run.log_every=1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return float(next(event["time"] for event in events if event["type"] == "step")) - start


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        minimal_script_seconds(folder), gputrain_seconds(folder)
        rows = []
        for number in range(pairs):
            rows.append((minimal_script_seconds(folder), gputrain_seconds(folder)))
            print(f"pair {number + 1}: minimal script {rows[-1][0]:.2f} s, gputrain {rows[-1][1]:.2f} s", flush=True)
    theirs, mine = (statistics.median(column) for column in zip(*rows, strict=True))
    more = statistics.median(mine - theirs for theirs, mine in rows)
    print(f"median: minimal script {theirs:.2f} s, gputrain {mine:.2f} s, {more:+.2f} s, ratio {mine / theirs:.2f}")


if __name__ == "__main__":
    main()

"""Benchmark a whole training against other frameworks: `python tests/bench/rivals.py [PAIRS] [NAME…]`.

All train the workload of `rivals/work.py`. The programs alternate, so that changes of the machine's speed affect all of
them; medians and ratios are printed. Requires `pip install '.[bench]'`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "rivals"))

import work  # noqa: E402

PYTHON = Path(sys.executable)


def commands(images: Path, folder: Path) -> dict[str, list[str]]:
    """Map the name of each program to its command."""
    keys = {
        "run.epochs": work.EPOCHS,
        "run.log_every": 10,
        "device.gpus": "cpu",
        "device.ranks": work.RANKS,
        "data.dataset": "fashion-mnist",
        "data.path": images,
        "data.batch_size": work.BATCH,
        "data.workers": work.WORKERS,
        "augment.crop_padding": work.PADDING,
        "model.name": "cnn",
        "optim.lr": work.LR,
        "optim.momentum": work.MOMENTUM,
    }
    pairs = [f"{key}={value}" for key, value in keys.items()]
    script = {path.stem: [str(PYTHON), str(path), str(images)] for path in sorted((HERE / "rivals").glob("*.py"))}
    torchrun = [str(PYTHON.with_name("torchrun")), "--standalone", f"--nproc-per-node={work.RANKS}"]
    return {
        "gputrain": [str(PYTHON.with_name("gputrain")), "run", "--headless", "--json", f"--runs-dir={folder}", *pairs],
        "by hand, mp.spawn": script["by_hand"],
        "Accelerate, torchrun": [*torchrun, *script["with_accelerate"][1:]],
    }


def run(command: list[str]) -> tuple[float, list[float]]:
    """Run a command; return its wall time in seconds and the training throughput of each epoch in images/s."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    images_per_step = work.BATCH * work.RANKS
    images = work.TRAIN // images_per_step * images_per_step
    if "epochs" in lines[-1]:
        return seconds, [images / seconds_of_epoch for seconds_of_epoch in lines[-1]["epochs"]]
    return seconds, [event["images_per_second"] for event in lines if event["type"] == "epoch"]


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        images = Path(name, "images")
        work.write_images(images)
        chosen = {
            name: command
            for name, command in commands(images, Path(name, "runs")).items()
            if not sys.argv[2:] or any(selected in name for selected in sys.argv[2:])
        }
        results: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in chosen}
        for repeat in range(pairs + 1):
            for name, command in chosen.items():
                seconds, rates = run(command)
                print(
                    f"{repeat}  {name:22s} {seconds:6.2f} s  {' '.join(f'{rate:6.0f}' for rate in rates)}", flush=True
                )
                # The first repeat warms up the page cache and writes bytecode.
                if repeat:
                    results[name].append((seconds, rates))
    print(f"\n{'':22s} {'total':>9s} {'first':>9s} {'later':>9s}   gputrain relative to it")
    for name, runs in results.items():
        total, first, later = medians(runs)
        line = f"{name:22s} {total:7.2f} s {first:7.0f}/s {later:7.0f}/s"
        if name != "gputrain" and "gputrain" in results:
            pairs_of = list(zip(results["gputrain"], runs, strict=True))
            times = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs_of)
            rate = statistics.median(medians([ours])[2] / medians([theirs])[2] for ours, theirs in pairs_of)
            line += f"   {times:5.2f} x the time, {rate:5.2f} x the images/s of a later epoch"
        print(line)


def medians(runs: list[tuple[float, list[float]]]) -> tuple[float, float, float]:
    """Medians of the total seconds, and of the images/s of the first and of the later epochs."""
    return (
        statistics.median(seconds for seconds, _ in runs),
        statistics.median(rates[0] for _, rates in runs),
        statistics.median(rate for _, rates in runs for rate in rates[1:]),
    )


if __name__ == "__main__":
    main()

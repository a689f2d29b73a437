"""Benchmark the input of ImageNet training: `python tests/bench/input.py [--help]`.

3,000 made-up photos of 500x375 become batches of random resized crops of 224x224, half of them flipped: uint8, before
normalization, in the memory of the training process. gputrain's stream pipeline reads them from a folder, from tar
shards and from those that it packs; `loaders/` has the other programs, each configured as its own documentation
recommends, with as many workers or threads as cores. Each measurement is a process of its own. The loaders alternate;
medians are printed. On a shared machine the CPU time is more reliable than the rate.

Requires `pip install '.[bench]'`; SPDL also the libraries of FFmpeg 4 to 9. Loaders that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADERS = Path(__file__).parent / "loaders"
sys.path.insert(0, str(LOADERS))

import made_photos  # noqa: E402
from task import Task  # noqa: E402

# Each name with the module in loaders/ and its option.
CONTESTANTS = {
    "gputrain, folder": ("gputrain_loader", "folder"),
    "gputrain, packed": ("gputrain_loader", "packed"),
    "gputrain, tar": ("gputrain_loader", "tar"),
    "torchvision reference, PIL": ("torchvision_reference", "pil"),
    "torchvision reference, tensor": ("torchvision_reference", "tensor"),
    "torchvision.io": ("torchvision_reference", "io"),
    "simplejpeg by hand": ("by_hand_simplejpeg", ""),
    "SPDL, FFmpeg": ("spdl_pipeline", "ffmpeg"),
    "SPDL, simplejpeg": ("spdl_pipeline", "simplejpeg"),
    "WebDataset, tar": ("webdataset_tar", ""),
}
OURS, REFERENCE = "gputrain", "torchvision reference, PIL"
MEASUREMENT_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Measurement:
    """Images per second, and CPU seconds per 1,000 images of all processes of a loader."""

    rate: float
    cpu: float


def measure(name: str, task: Task, images: int, seconds: float) -> Measurement | str:
    """Measure a loader in a new process; return the reason if it cannot run."""
    module, option = CONTESTANTS[name]
    command = [sys.executable, str(LOADERS / "measure.py"), module, option, task.to_json(), str(images), str(seconds)]
    # A loader has one worker or thread per core, and none of them starts threads of its own.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=MEASUREMENT_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no result within {MEASUREMENT_TIMEOUT_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    result = json.loads(lines[-1])
    if "missing" in result:
        return str(result["missing"])
    return Measurement(result["images"] / result["seconds"], result["cpu_seconds"] / result["images"] * 1000)


def run_rounds(names: list[str], task: Task, arguments: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Measure all loaders once per round. Each round begins with another one, so that none always follows the same."""
    results: dict[str, list[Measurement]] = {name: [] for name in names}
    for repeat in range(arguments.rounds):
        shift = repeat * len(names) // arguments.rounds
        for name in [*names[shift:], *names[:shift]]:
            if name not in results:
                continue
            measured = measure(name, task, arguments.images, arguments.seconds)
            if isinstance(measured, str):
                print(f"skipped: {name}: {measured}", flush=True)
                del results[name]
                continue
            results[name].append(measured)
            print(f"{repeat + 1}  {name:30s} {measured.rate:7.0f} images/s  {measured.cpu:6.2f} CPU s", flush=True)
    return results


def print_table(results: dict[str, list[Measurement]], cores: int) -> None:
    """Print medians. A ratio is the median of the ratios within the rounds; above 1 the loader is faster."""
    rivals = [name for name in results if not name.startswith(OURS)]
    rates = {name: statistics.median(entry.rate for entry in runs) for name, runs in results.items()}
    costs = {name: statistics.median(entry.cpu for entry in runs) for name, runs in results.items()}
    fastest = max(rivals, key=rates.__getitem__, default=None)
    cheapest = min(rivals, key=costs.__getitem__, default=None)
    plural = "core" if cores == 1 else "cores"
    print(f"\n| {cores} {plural} | images/s per core | ÷ torchvision | ÷ {fastest} | CPU s per 1,000 images", end="")
    print(f" | torchvision's CPU ÷ its | CPU of {cheapest} ÷ its |\n|---|---|---|---|---|---|---|")
    for name in sorted(results, key=costs.__getitem__):
        runs = results[name]
        cells = [
            f"{rates[name] / cores:.0f}",
            _ratio((ours.rate, theirs.rate) for ours, theirs in _pairs(runs, results, REFERENCE)),
            _ratio((ours.rate, theirs.rate) for ours, theirs in _pairs(runs, results, fastest)),
            f"{costs[name]:.2f}",
            _ratio((theirs.cpu, ours.cpu) for ours, theirs in _pairs(runs, results, REFERENCE)),
            _ratio((theirs.cpu, ours.cpu) for ours, theirs in _pairs(runs, results, cheapest)),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def _pairs(
    runs: list[Measurement], results: dict[str, list[Measurement]], other: str | None
) -> Iterable[tuple[Measurement, Measurement]]:
    return zip(runs, results.get(other or "", []), strict=False)


def _ratio(pairs: Iterable[tuple[float, float]]) -> str:
    ratios = [mine / theirs for mine, theirs in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of the loaders to measure; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="least duration of a measurement")
    # CPU time counts in units of 10 ms, and includes what the workers have prefetched.
    parser.add_argument("--images", type=int, default=1000, help="least number of images per core in a measurement")
    parser.add_argument("--cores", default="1,2", help="numbers of cores, separated by commas")
    parser.add_argument("--photos", type=Path, help="folder that keeps the photos for the next time")
    parser.add_argument("--count", type=int, default=3000, help="number of photos")
    parser.add_argument("--batch-size", type=int, default=64)
    return parser.parse_args()


def run_benchmark(arguments: argparse.Namespace, root: Path) -> None:
    core_counts = [int(number) for number in arguments.cores.split(",")]
    tasks = [Task(root, cores, arguments.batch_size) for cores in core_counts]
    made_photos.make_photos(tasks[0], arguments.count)
    print(f"{len(tasks[0].files())} photos, {made_photos.mean_size(tasks[0]):.0f} kB on average", flush=True)
    names = [name for name in CONTESTANTS if not arguments.names or any(part in name for part in arguments.names)]
    results: list[tuple[Any, int]] = []
    for task in tasks:
        print(f"\n{task.cores} of {os.cpu_count()} cores", flush=True)
        results.append((run_rounds(names, task, arguments), task.cores))
    for measured, cores in results:
        print_table(measured, cores)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        run_benchmark(arguments, arguments.photos or Path(name))


if __name__ == "__main__":
    main()

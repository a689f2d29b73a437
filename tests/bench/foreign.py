"""Benchmark the readers of foreign metrics: `python tests/bench/foreign.py [--events 200000] [--rounds 5]`.

Writes files as each library does, reads each whole, and prints points per CPU second as Markdown, with `--runs 2000`
the time to find that many runs below one path, and with `--large-gb 5` the time and memory for 10 million events
between images of that size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.foreign.csv_file import CsvFile
from engine.foreign.folders import RunFollower, find_runs
from engine.foreign.json_lines import JsonLines
from engine.foreign.reading import Source
from engine.foreign.tensorboard import EventFolder
from engine.foreign.wandb_log import WandbLog
from support.foreign import event, field, frame, scalar, wandb_file

_FRAME_BYTES = 12
TAGS = ("train/loss", "train/accuracy", "val/loss", "learning_rate")


def write_events(path: Path, count: int) -> None:
    """Write scalars as torch's SummaryWriter does, one per event."""
    with (path / "events.out.tfevents.1.host").open("wb") as file:
        for step in range(count):
            file.write(frame(event(step, scalar(TAGS[step % 4], 1 / (step + 1)), time=1.8e9 + step)))


def write_csv(path: Path, count: int) -> None:
    rows = (f"{step // 100},{step},{1 / (step + 1)},,0.1" for step in range(count))
    (path / "metrics.csv").write_text("\n".join(["epoch,step,train_loss,val_loss,lr", *rows, ""]))


def write_json(path: Path, count: int) -> None:
    rows = (json.dumps({"step": step, "loss": 1 / (step + 1), "lr": 0.1}) for step in range(count))
    (path / "log.jsonl").write_text("\n".join([*rows, ""]))


def write_wandb(path: Path, count: int) -> None:
    rows = ({"_step": step, "loss": 1 / (step + 1), "lr": 0.1} for step in range(count))
    (path / "run-a.wandb").write_bytes(wandb_file(list(rows)))


FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Source]]] = {
    "TensorBoard": (write_events, EventFolder),
    "CSV": (write_csv, lambda path: CsvFile(path / "metrics.csv")),
    "JSON lines": (write_json, lambda path: JsonLines(path / "log.jsonl")),
    "W&B": (write_wandb, lambda path: WandbLog(path / "run-a.wandb")),
}


def read_all(source: Source) -> Iterator[int]:
    """Yield the number of points of each poll."""
    while True:
        reading = source.poll()
        yield len(reading.points)
        if reading.share >= 1:
            return


def cpu_seconds(work: Callable[[], int]) -> tuple[int, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--large-gb", type=float, default=0)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read_large(arguments.read)
        return
    print("| Format | Points per CPU second | First poll |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        readers: dict[str, Callable[[], int]] = {}
        for name, (write, make) in FORMATS.items():
            path = Path(folder) / str(zlib.crc32(name.encode()))
            path.mkdir()
            write(path, arguments.events)
            readers[name] = lambda path=path, make=make: sum(read_all(make(path)))  # type: ignore[misc]
            started = time.monotonic()
            make(path).poll()
            first = time.monotonic() - started
            print(f"| {name} | … | {first * 1000:.0f} ms |")
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(arguments.rounds):
            for name, read in readers.items():
                count, seconds = cpu_seconds(read)
                rates[name].append(count / seconds)
        for name, values in rates.items():
            print(f"| {name} | {statistics.median(values):,.0f} | |")
    if arguments.runs:
        print(f"{arguments.runs:,} runs found in {time_to_find(arguments.runs)}")
    if arguments.large_gb:
        with tempfile.TemporaryDirectory() as folder:
            write_large(Path(folder), int(arguments.large_gb * 1e9))
            subprocess.run([sys.executable, __file__, "--read", folder], check=True)


def time_to_find(count: int) -> str:
    """Return how long it takes to find runs of three formats, each in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder) / f"sweep-{number % 10}" / f"run-{number:05d}" / "logs"
            path.mkdir(parents=True)
            (write_events, write_csv, write_json)[number % 3](path, 3)
            (path.parent / "checkpoints").mkdir()
            (path.parent / "model.bin").write_bytes(struct.pack("<Q", 0))
        started = time.monotonic()
        found, cpu_s = cpu_seconds(lambda: len(find_runs(Path(folder)).runs))
        assert found == count
        return f"{time.monotonic() - started:.2f} s, {cpu_s:.2f} CPU s"


LARGE_EVENTS = 10_000_000
LARGE_FILES = 5
# The varints of all steps from this one on have four bytes, so that the records of a tag differ in two places only.
FIRST_LARGE_STEP = 1 << 21
IMAGE_BYTES = 1 << 19
LARGE_MINIMUM = -7.0


def write_large(path: Path, total_bytes: int) -> None:
    """Write `LARGE_EVENTS` scalars of four tags with images between them, and one value below all others."""
    import numpy as np

    steps = np.arange(LARGE_EVENTS // len(TAGS) // LARGE_FILES) + FIRST_LARGE_STEP
    image = frame(event(1, field(1, "image") + field(4, field(4, os.urandom(IMAGE_BYTES)))))
    for number in range(LARGE_FILES):
        parts = []
        for tag in TAGS:
            rows = np.tile(np.frombuffer(frame(event(FIRST_LARGE_STEP, scalar(tag, 0.5))), np.uint8), (len(steps), 1))
            varints = steps[:, None] >> np.array([0, 7, 14, 21]) & 0x7F | [0x80, 0x80, 0x80, 0]
            rows[:, _FRAME_BYTES + 10 : _FRAME_BYTES + 14] = varints
            values = (1 / steps).astype("<f4")
            values[len(steps) // 2] = LARGE_MINIMUM
            rows[:, -8:-4] = values.view(np.uint8).reshape(-1, 4)
            parts.append(rows)
        records = np.concatenate(parts, axis=1).tobytes()
        num_images = max((total_bytes // LARGE_FILES - len(records)) // len(image), 1)
        row_bytes = len(records) // len(steps)
        rows_per_image = math.ceil(len(steps) / num_images)
        with (path / f"events.out.tfevents.{number}.host").open("wb") as file:
            for start in range(0, len(records), rows_per_image * row_bytes):
                file.write(records[start : start + rows_per_image * row_bytes])
                file.write(image)
        steps = steps + len(steps)


def read_large(path: Path) -> None:
    """Follow a large run to its end without keeping its points, and print what that took."""
    started, first = time.monotonic(), ""
    follower = RunFollower(find_runs(path).runs[0])
    count, low, share, longest = 0, math.inf, 0.0, 0.0
    while share < 1:
        before = time.monotonic()
        (reading,) = follower.poll()
        longest = max(longest, time.monotonic() - before)
        assert reading.problem is None
        share = reading.share
        count += len(reading.points)
        low = min(low, min((point.value for point in reading.points), default=math.inf))
        if count and not first:
            first = f"first points after {time.monotonic() - started:.2f} s ({share:.2%} read)"
    assert low == LARGE_MINIMUM
    size = sum(file.stat().st_size for file in path.iterdir())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{count:,} events in {size / 1e9:.1f} GB: {first}, whole in {time.monotonic() - started:.0f} s")
    cpu_s = usage.ru_utime + usage.ru_stime
    print(f"{cpu_s:.0f} CPU s, longest poll {longest:.2f} s, {peak_mib():.0f} MiB")


def peak_mib() -> float:
    """Return the peak of this process's resident memory. `ru_maxrss` includes that of its parent before `exec`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()

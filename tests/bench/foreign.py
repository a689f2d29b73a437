"""Benchmark the readers of foreign metrics: `python tests/bench/foreign.py [--events 200000] [--rounds 5]`.

Writes files as each library does, reads each whole, and prints points per CPU second as Markdown, and with
`--runs 2000` the time to find that many runs below one path.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.foreign.csv_file import CsvFile
from engine.foreign.folders import RunFinder, find_runs
from engine.foreign.json_lines import JsonLines
from engine.foreign.reading import Source
from engine.foreign.run_list import ForeignRunList
from engine.foreign.tensorboard import EventFolder
from engine.foreign.wandb_log import WandbLog
from support.foreign import event, frame, scalar, wandb_file

IDLE_SECONDS = 20.0
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
    arguments = parser.parse_args()
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
        with tempfile.TemporaryDirectory() as folder:
            make_runs(Path(folder), arguments.runs)
            print(f"{arguments.runs:,} runs found in {time_to_find(Path(folder), arguments.runs):.2f} s")
            print_list_times(Path(folder), arguments.runs)


def make_runs(folder: Path, count: int) -> None:
    """Write runs of three formats, each in a folder of its own."""
    for number in range(count):
        path = folder / f"sweep-{number % 10}" / f"run-{number:05d}" / "logs"
        path.mkdir(parents=True)
        (write_events, write_csv, write_json)[number % 3](path, 3)
        (path / "hparams.yaml").write_text(f"lr: {0.1 / (1 + number)}\nseed: {number}\n")
        (path.parent / "checkpoints").mkdir()
        (path.parent / "model.bin").write_bytes(struct.pack("<Q", 0))


def time_to_find(folder: Path, count: int) -> float:
    """Return the seconds to find all runs."""
    started = time.monotonic()
    assert len(find_runs(folder).runs) == count
    return time.monotonic() - started


def print_list_times(folder: Path, count: int) -> None:
    """Print when the list of the screen has a page, all runs and all values, and what it takes without a change."""
    followed, started, cpu = ForeignRunList(RunFinder(folder).search), time.monotonic(), time.process_time()
    times: dict[str, tuple[float, float]] = {}
    while not followed.complete:
        followed.poll(0.1)
        passed = time.monotonic() - started, time.process_time() - cpu
        if len(followed.runs) >= 50:
            times.setdefault("a page of runs", passed)
        if followed.has_searched:
            times.setdefault("all runs", passed)
    times["all values"] = passed
    print("List: " + ", ".join(f"{what} in {wall:.2f} s ({used:.2f} s CPU)" for what, (wall, used) in times.items()))
    started, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - started < IDLE_SECONDS:
        followed.poll(0.1)
        time.sleep(1.0)
    share = (time.process_time() - cpu) / (time.monotonic() - started)
    print(f"List that is left open: {share:.1%} of a core, {count:,} runs that do not change")


if __name__ == "__main__":
    main()

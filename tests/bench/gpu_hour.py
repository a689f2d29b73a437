"""Measure gputrain on the GPUs of this machine in half an hour: `tests/gpu_hour.sh [--data FOLDER] [PART ...]`.

The parts are `tests`, `steps`, `runs`, `input` and `readings`. Each measurement is a process of its own. This process
never uses CUDA: with a context of its own, `--gpus free:1` would refuse the GPU. What a part finds is printed, and
stands in tests/bench/RESULTS.md at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
TESTS, RESULTS = BENCH.parent, BENCH / "RESULTS.md"
sys.path.insert(0, str(BENCH / "loaders"))

HEADING = "## On GPUs"
DESCRIBE_GPUS = """
import torch
count = torch.cuda.device_count()
names = {torch.cuda.get_device_name(gpu) for gpu in range(count)}
print(count, ", ".join(names) or "no GPU", torch.__version__, sep="|")
"""
# Keeps the GPU that nvidia-smi numbers 0 at a steady load: matrix products, and copies over PCIe in both directions.
LOAD_GPU = """
import torch
factors = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
copied = torch.empty(2**26, dtype=torch.uint8, device="cuda")
while True:
    for _ in range(4):
        torch.mm(*factors)
    copied.copy_(host, non_blocking=True)
    host.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
"""
LOAD_START_S, SAMPLES = 15, 15  # until the clocks are those under load
STEPS = {
    "bf16": ("precision.amp=bf16",),
    "bf16, contiguous": ("precision.amp=bf16", "model.channels_last=off"),
    "TF32": ("precision.tf32=on",),
    "float32": ("precision.tf32=off",),
}
FAKE_DATA = ("--dataset", "fake", "data.image_size=28", "data.channels=1", "--amp", "bf16")
RESNET50 = ("--model", "resnet50", "--amp", "bf16", "data.image_size=224", "augment.resized_crop=true")
COMPILED = ("model.compile=true", "model.compile_mode=reduce-overhead")
# Dive into Deep Learning, Concise Implementation for Multiple GPUs, PyTorch edition, on one GPU that it does not name.
FASHION_MNIST = "Fashion-MNIST with ResNet-18 (published: 91%, 12.2 s per epoch)"
PHOTOS, LINKS = 1500, 8  # links to each photo, so that an epoch is not all start and end
# Columns that `--gpm-metrics=2,5,10` adds behind all others: NVML's metrics of SMs, tensor cores and DRAM, in percent.
GPM_METRICS = {"2": "sm_active", "5": "tensor_active", "10": "dram_active"}
DMON = ("nvidia-smi", "dmon", "-i", "0", "-s", "pucmt", f"--gpm-metrics={','.join(GPM_METRICS)}", "-c", str(SAMPLES))
# A reading of `gputrain gpus --json`, and the column of dmon that means the same: one unit of the column in ours, and
# how much two samples of different moments may differ, relative and absolute.
TWINS = {
    "power": ("pwr", 1, 0.1, 10),
    "temperature": ("gtemp", 1, 0.05, 2),
    "memory_temperature": ("mtemp", 1, 0.05, 2),
    "util": ("sm", 1, 0.05, 5),
    "memory_util": ("mem", 1, 0.2, 5),
    "sm_clock": ("pclk", 1, 0.05, 30),
    "memory_clock": ("mclk", 1, 0.05, 1),
    "memory_used": ("fb", 2**20, 0.01, 64),
    "pcie_received": ("rxpci", 1024, 0.3, 200),
    "pcie_sent": ("txpci", 1024, 0.3, 200),
    **{name: (name, 1, 0.05, 5) for name in GPM_METRICS.values()},
}

Row = tuple[str, str]


class MeasurementError(Exception):
    """A program failed or did not end; the message is the result of the measurement."""


@dataclass(frozen=True)
class Hour:
    """A folder for runs, the number of GPUs, the data of Fashion-MNIST, and whether fake GPUs compute on the CPU."""

    folder: Path
    gpus: int
    data: Path | None
    is_rehearsal: bool

    def size(self, on_card: int, in_rehearsal: int) -> int:
        return in_rehearsal if self.is_rehearsal else on_card

    def python(self, *arguments: object, limit_s: float) -> str:
        """Run Python to its end, at the most for a time, and return what it prints. Raises MeasurementError."""
        command = [sys.executable, *map(str, arguments)]
        process = start(command, self.folder)
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"no end within {limit_s:.0f} s") from error
        finally:
            kill_group(process)
        if process.returncode != 0:
            last = next((line for line in reversed(f"{output}\n{errors}".splitlines()) if line.strip()), "no output")
            raise MeasurementError(f"exit code {process.returncode}: {last}")
        return output

    def train(self, *arguments: str) -> dict[str, Any]:
        """Train a run to its end; return its summary, and medians over all epochs but the first."""
        name = f"run-{len(list(self.folder.glob('run-*')))}"
        sizes = ("--epochs", str(self.size(5, 2)), "--runs-dir", str(self.folder), "--name", name)
        self.python("-m", "tui", "run", "--headless", *sizes, *arguments, limit_s=300)
        events = map(json.loads, (self.folder / name / "events.jsonl").read_text().splitlines())
        epochs = [event for event in events if event["type"] == "epoch"][1:]
        summary: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text())
        names = ("seconds", "images_per_second")
        return summary | {name: statistics.median(epoch[name] for epoch in epochs) for name in names}

    def resnet18(self) -> tuple[str, ...]:
        return ("--model", "resnet18-small", *(("model.options={width: 2}",) if self.is_rehearsal else ()))

    def gpu_counts(self) -> list[int]:
        return [count for count in (1, 2, 4, 8) if count <= self.gpus]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a program in a process group of its own, with the source tree on its path."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_tests(hour: Hour) -> Iterator[Row]:
    """Run the tests with the marker `gpu`: equality with the CPU, resume, faults, memory."""
    markers = "gpu and not card" if hour.is_rehearsal else "gpu"
    options = ("-q", "-p", "no:cacheprovider", "-m", markers, "--basetemp", hour.folder / "tests")
    output = hour.python("-m", "pytest", *options, TESTS, limit_s=900)
    yield "tests with the marker `gpu`", output.splitlines()[-1]


def measure_steps(hour: Hour) -> Iterator[Row]:
    """Compare training steps with those of a bare PyTorch loop."""
    # As many images as the steps need: a GPU gets all of them in its memory.
    images = f"data.fake_train={hour.size(100_000, 1000)}"
    sizes = (*hour.resnet18(), images, "--batch", hour.size(256, 2), "--steps", hour.size(100, 2))
    for title, keys in STEPS.items():
        output = hour.python(BENCH / "step.py", *sizes, *keys, limit_s=120)
        yield f"step of ResNet-18, {title}", next(line[4:].strip() for line in output.splitlines() if "wall" in line)


def measure_runs(hour: Hour) -> Iterator[Row]:
    """Train ResNet-18 in the memory of one and more GPUs, without input, compiled, and on a real dataset."""
    images, batch = hour.size(60_000, 64), hour.size(256, 8)
    sizes = (f"data.fake_train={images}", f"data.fake_val={images // 6}", f"data.batch_size={batch}")
    resnet = (*FAKE_DATA, *hour.resnet18(), *sizes)
    first = 0.0
    for count in hour.gpu_counts():
        run = hour.train(*resnet, "--gpus", f"free:{count}", "data.pipeline=memory")
        first = first or run["images_per_second"]
        yield f"ResNet-18 on {count} GPUs", f"{describe(run)}, {run['images_per_second'] / first:.2f}x"
    one = (*resnet, "--gpus", "free:1")
    yield "ResNet-18 on a fixed batch", describe(hour.train(*one, "data.pipeline=fixed"))
    if not hour.is_rehearsal:
        yield "ResNet-18, compiled, CUDA graphs", describe(hour.train(*one, "data.pipeline=memory", *COMPILED))
    if hour.data is not None:
        keys = ("fashion-mnist", "--data-path", str(hour.data), "data.download=false", "--gpus", "free:1", "--amp=bf16")
        run = hour.train(*keys, "--epochs", "10")
        yield FASHION_MNIST, f"{describe(run)}, accuracy {run['val_accuracy']:.2%}"


def measure_input(hour: Hour) -> Iterator[Row]:
    """Train ResNet-50 on photos of 500x375 from a folder and from shards, and without input."""
    import made_photos
    from task import Task

    photos = Task(hour.folder / "photos", 1, 1)
    made_photos.make_photos(photos, hour.size(PHOTOS, 40))
    many = hour.folder / "many"
    for photo, number in product(photos.files(), range(LINKS)):
        (many / photo.parent.name).mkdir(parents=True, exist_ok=True)
        (many / photo.parent.name / f"{photo.stem}-{number}.jpg").hardlink_to(photo)
    shards = hour.folder / "shards"
    hour.python("-m", "tui", "data", "pack", many, "-o", shards, limit_s=300)
    model = (*RESNET50, "--gpus", "free:1", "--batch-size", str(hour.size(256, 4)))
    model = (*model, *(("--model", "linear") if hour.is_rehearsal else ()))
    for title, path, keys in (
        ("a fixed batch", many, ("data.pipeline=fixed",)),
        ("a folder", many, ()),
        ("shards", shards, ()),
    ):
        yield f"ResNet-50 from {title}", describe(hour.train(*model, "--data-path", str(path), *keys))


def describe(run: Mapping[str, Any]) -> str:
    mfu = "" if run.get("mfu") is None else f", MFU {run['mfu']:.1%}"
    return f"{run['seconds']:.2f} s per epoch, {run['images_per_second']:,.0f} images/s{mfu}"


def compare_readings(hour: Hour) -> Iterator[Row]:
    """Sample a GPU under load with gputrain and with `nvidia-smi dmon` at the same time."""
    load = start([sys.executable, "-c", LOAD_GPU], hour.folder)
    try:
        time.sleep(LOAD_START_S)
        theirs = start(list(DMON), hour.folder)
        watch = ("gpus", "--json", "--watch", "--interval", "1", "--count", SAMPLES)
        ours = hour.python("-m", "tui", *watch, limit_s=60)
        columns = dmon_medians(theirs.communicate(timeout=60)[0])
    finally:
        kill_group(load)
    for name, values, agree in compare(reading_medians(ours), columns):
        yield f"reading {name}", values if agree else f"**differs**: {values}"


def dmon_medians(output: str) -> dict[str, float]:
    """Return the median of each column of `nvidia-smi dmon`; "-" is no value. GPM columns get the names of readings."""
    header: list[str] = []
    columns: dict[str, list[float]] = {}
    for line in output.splitlines():
        words = line.split()
        if words[:2] == ["#", "gpu"]:
            header = [*words[1 : -len(GPM_METRICS)], *GPM_METRICS.values()]
        elif words[:1] == ["0"]:
            for name, word in zip(header, words, strict=True):
                if word.replace(".", "", 1).isdigit():
                    columns.setdefault(name, []).append(float(word))
    return {name: statistics.median(values) for name, values in columns.items()}


def reading_medians(output: str) -> dict[str, float]:
    """Return the medians of the readings of the first GPU that `gputrain gpus --watch --json` prints."""
    samples = [json.loads(line)["gpus"][0] for line in output.splitlines()]
    values = {name: [value for sample in samples if (value := sample[name]["value"]) is not None] for name in TWINS}
    return {name: statistics.median(found) for name, found in values.items() if found}


def compare(readings: Mapping[str, float], columns: Mapping[str, float]) -> Iterator[tuple[str, str, bool]]:
    """Yield name, both values and whether they agree, for each reading. One that only one program knows differs."""
    for name, (column, unit, relative, absolute) in TWINS.items():
        ours, theirs = readings.get(name), columns.get(column)
        if ours is None or theirs is None:
            yield name, f"gputrain {ours}, nvidia-smi {theirs}", ours is theirs
            continue
        agree = abs(ours / unit - theirs) <= max(absolute, relative * theirs)
        yield name, f"gputrain {ours / unit:,.1f}, nvidia-smi {theirs:,.1f}", agree


PARTS: dict[str, Callable[[Hour], Iterator[Row]]] = {
    "tests": run_tests,
    "steps": measure_steps,
    "runs": measure_runs,
    "input": measure_input,
    "readings": compare_readings,
}


def measure(hour: Hour, parts: list[str]) -> list[Row]:
    """Return the rows of the parts; what fails ends its part with a row, because the others are worth as much."""
    rows: list[Row] = []
    for name in parts:
        try:
            for row in PARTS[name](hour):
                print(*row, sep=": ", flush=True)
                rows.append(row)
        except (MeasurementError, OSError, ValueError, LookupError) as error:
            print(f"{name}: failed: {error}", flush=True)
            rows.append((name, f"**failed**: {error}"))
    return rows


def write_results(results: Path, machine: str, rows: list[Row]) -> None:
    """Replace the last section of the results with a table."""
    cells = [" | ".join(cell.replace("|", "/") for cell in row) for row in rows]
    table = "\n".join(["| | measured |", "|---|---|", *(f"| {cell} |" for cell in cells)])
    kept = results.read_text().partition(HEADING)[0]
    results.write_text(f"{kept}{HEADING}\n\n{machine}, by `tests/gpu_hour.sh`:\n\n{table}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of Fashion-MNIST, as torchvision keeps it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="page whose last section is replaced")
    parser.add_argument("--rehearsal", action="store_true", help="use sizes that fake GPUs can compute")
    arguments = parser.parse_args()
    if unknown := {*arguments.parts} - {*PARTS}:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="gputrain-gpu-hour-") as folder:
        data = arguments.data and arguments.data.absolute()
        found = Hour(Path(folder), 0, data, arguments.rehearsal).python("-c", DESCRIBE_GPUS, limit_s=120)
        count, names, torch = found.strip().split("|")
        if count == "0":
            parser.error("torch finds no GPU")
        hour = Hour(Path(folder), int(count), data, arguments.rehearsal)
        rows = measure(hour, arguments.parts or [*PARTS])
    machine = f"{count} x {names}, torch {torch}, Python {platform.python_version()}, {os.cpu_count()} cores"
    write_results(arguments.results, machine, rows)
    return int(any("**" in result for _, result in rows))


if __name__ == "__main__":
    sys.exit(main())

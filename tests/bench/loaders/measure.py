"""Measure one loader in a process of its own, for `tests/bench/input.py`.

`python measure.py MODULE OPTION TASK IMAGES SECONDS` prints one line of JSON: images, wall time and CPU time of this
process and its children, or which package is missing. It measures at least so many images per core and seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
from task import Batches, Task

WARMUP_SECONDS, WARMUP_BATCHES_PER_CORE = 1.0, 4


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its children, also of threads without the GIL."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def measure(batches: Batches, task: Task, images_per_core: int, seconds: float) -> dict[str, object]:
    """Consume batches as fast as they come. The workers start, and what is compiled is, before the measurement."""
    start = time.perf_counter()
    for number, images in enumerate(batches, 1):  # noqa: B007
        if number >= WARMUP_BATCHES_PER_CORE * task.cores and time.perf_counter() - start > WARMUP_SECONDS:
            break
    assert images.shape == (task.batch_size, 3, 224, 224), images.shape
    assert str(images.dtype) == "torch.uint8", images.dtype
    count, cpu_start, start = 0, cpu_seconds(), time.perf_counter()
    for images in batches:
        count += len(images)
        if count >= images_per_core * task.cores and time.perf_counter() - start > seconds:
            break
    wall = time.perf_counter() - start
    return {"images": count, "seconds": wall, "cpu_seconds": cpu_seconds() - cpu_start}


def main() -> None:
    module, option, task_json, images_per_core, seconds = sys.argv[1:]
    task = Task.from_json(task_json)
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: task.cores]))
    # The repository is not installed in every environment of rivals.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    try:
        batches = importlib.import_module(module).batches(task, option)
        result = measure(iter(batches), task, int(images_per_core), float(seconds))
    except ImportError as error:
        result = {"missing": str(error)}
    print(json.dumps(result), flush=True)
    # Workers and threads of an endless stream do not end by themselves.
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()

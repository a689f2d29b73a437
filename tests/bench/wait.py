"""Measure how long a step waits for data that takes 90% of the loader's rate: `python tests/bench/wait.py [--help]`.

In each round the stream pipeline first loads as fast as it can, which gives its rate. Then a step that only sleeps
consumes 90% of that rate, for some epochs of training and validation on the photos of `tests/bench/input.py`. What is
printed is the share of an epoch's training in which the step waited for its batch. On a shared machine run it with a
high priority (`nice -n -20`): whatever takes the cores in between makes the step wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

LOADERS = Path(__file__).parent / "loaders"
sys.path.insert(0, str(LOADERS))

import gputrain_loader  # noqa: E402
import made_photos  # noqa: E402
from task import Task  # noqa: E402

from engine.config.schema import Config  # noqa: E402
from engine.data.pipelines.device import StreamingLoader  # noqa: E402
from engine.data.pipelines.loader import BatchLoader  # noqa: E402
from engine.data.sampler import BatchRequest, DistributedBatchSampler  # noqa: E402
from engine.data.sources.base import ImageSource  # noqa: E402

# In a run the loader starts during the rest of the setup: model, process group, warm-up.
SETUP_SECONDS = 2.0
# Batches that are loaded before the rate is measured, more than the prefetched ones.
FIRST_BATCHES = 12


@dataclass(frozen=True)
class Wait:
    """Images per second that the step consumes, and the share of waiting in each epoch."""

    rate: float
    shares: list[float]


class Loader:
    """The stream pipeline of a run on the CPU, for the requests of `epochs` epochs."""

    def __init__(self, task: Task, option: str, epochs: int) -> None:
        dataset, _, kind = option.partition(":")
        self.config, self.source = gputrain_loader.open_dataset(task, dataset, kind)
        self.sampler = _sampler(self.config, self.source, task)
        requests: Iterable[BatchRequest] = self.sampler.requests(epochs)
        image_format = gputrain_loader.input_format(self.config, self.source)
        self.batches = BatchLoader(self.source, self.config, image_format, requests, task.cores)
        self.streamed = StreamingLoader(self.batches, image_format, torch.device("cpu"))


def _sampler(config: Config, source: ImageSource, task: Task) -> DistributedBatchSampler:
    return DistributedBatchSampler(
        source.num_images("train"), source.num_images("val"), task.batch_size, 0, 1, True, config.run.seed
    )


def measure_rate(task: Task, option: str, seconds: float) -> float:
    loader = Loader(task, option, 10_000)
    for _ in range(FIRST_BATCHES):
        next(loader.streamed)
    images, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        images += len(next(loader.streamed).labels)
    return images / passed


def measure_wait(task: Task, option: str, rate: float, epochs: int) -> Wait:
    """Return the share of waiting of each epoch in which steps consume `rate` images per second."""
    loader = Loader(task, option, epochs)
    time.sleep(SETUP_SECONDS)
    shares = []
    for epoch in range(1, epochs + 1):
        waited, start = 0.0, time.perf_counter()
        for _ in loader.sampler.train_requests(epoch):
            waited += _step(loader, rate)
        shares.append(waited / (time.perf_counter() - start))
        for _ in loader.sampler.val_requests():
            _step(loader, rate)
    return Wait(rate, shares)


def _step(loader: Loader, rate: float) -> float:
    """Wait for a batch, and sleep for as long as a step that consumes `rate` images per second. Returns the wait."""
    start = time.perf_counter()
    batch = next(loader.streamed)
    received = time.perf_counter()
    time.sleep(len(batch.labels) / rate)
    return received - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, help="keep the photos in this folder (default: a temporary folder)")
    parser.add_argument("--count", type=int, default=3000, help="number of photos")
    parser.add_argument("--datasets", nargs="+", default=["folder", "packed", "tar"], help="such as folder:processes")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="decode threads")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.9, help="of the loader's rate that the step consumes")
    parser.add_argument("--epochs", type=int, default=2, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="of each measurement of the rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(arguments.photos or Path(folder), arguments.cores, arguments.batch_size)
        made_photos.make_photos(task, arguments.count)
        shares: dict[str, list[float]] = {option: [] for option in arguments.datasets}
        for number in range(1, arguments.rounds + 1):
            for option in arguments.datasets:
                rate = arguments.share * measure_rate(task, option, arguments.seconds)
                wait = measure_wait(task, option, rate, arguments.epochs)
                shares[option] += wait.shares
                epochs = ", ".join(f"{share:.1%}" for share in wait.shares)
                print(f"{number}  {option:18s} step {wait.rate:6.0f} images/s  data wait {epochs}", flush=True)
        for option, values in shares.items():
            print(f"{option:18s} data wait: median {statistics.median(values):.1%}, maximum {max(values):.1%}")


if __name__ == "__main__":
    main()

"""Benchmark `data.decoder` on a GPU: `python tests/bench/decoder.py [ROUNDS] [--images N] [--workers N ...]`.

Made-up photos of 500x375 (`loaders/made_photos.py`) become normalized batches of random resized crops of 224x224 on the
GPU, from a folder and from a packed set: with libjpeg-turbo in the loader process, and with nvJPEG. Nothing else runs
on the GPU. Each measurement is a process of its own; the two alternate, and medians are printed. It prints the rows of
a Markdown table, the last with what `data.decoder=auto` takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "loaders"))

import made_photos
from task import SIZE, Task

from engine.config.loader import resolve_config
from engine.data.batching import build_sampler
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.choose_decoder import DecoderChoice
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source

WARMUP_STEPS, STEPS, MIN_SECONDS = 8, 20, 3.0


def measure(dataset: str, path: str, decoder: str, workers: int, batch_size: int) -> dict[str, object]:
    """Return the images/s of a decoder, and the seconds per stage for 1,000 images. For auto, its choice."""
    keys = [f"data.dataset={dataset}", f"data.path={path}", f"data.image_size={SIZE}", f"data.batch_size={batch_size}"]
    config = resolve_config(None, [*keys, "augment.resized_crop=true", "augment.flip=true"]).config
    source, device = open_source(config), torch.device("cuda", 0)
    image_format, sampler = model_input_format(config, source), build_sampler(config, source, 1)
    requests = itertools.chain.from_iterable(map(sampler.train_requests, itertools.count(1)))
    choice = DecoderChoice(None if decoder == "auto" else "gpu" if decoder == "gpu" else "cpu")
    pipeline = InputPipeline(
        PipelineChoice("stream", ""), source, config, image_format, requests, workers, decoder_choice=choice
    )
    if decoder == "auto":
        with pipeline.decided_afterwards():
            choice = pipeline.measure_decoders(next(sampler.train_requests(1)), device)
        return {"choice": f"{choice.decoder} ({choice.reason})"}
    loader = pipeline.device_loader(device, torch.channels_last)
    for _ in range(WARMUP_STEPS):
        next(loader)
    torch.cuda.synchronize()
    loader.start_stage_times()
    began, images = time.perf_counter(), 0
    while images < STEPS * batch_size or time.perf_counter() - began < MIN_SECONDS:
        images += len(next(loader).labels)
    torch.cuda.synchronize()
    seconds, times = time.perf_counter() - began, loader.stop_stage_times()
    assert times is not None
    return {
        "rate": images / seconds,
        "stages": {name: 1000 * spent / max(times.images, 1) for name, spent in times.seconds.items()},
    }


def run(arguments: Sequence[object]) -> dict[str, object]:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        sys.exit(done.stderr)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def print_row(measurement: str, result: str) -> None:
    print(f"| {measurement} | {result} |", flush=True)


def compare(dataset: str, path: Path, workers: int, rounds: int, batch_size: int) -> None:
    rates: dict[str, list[float]] = {"cpu": [], "gpu": []}
    stages: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for decoder, values in rates.items():
            result = run([dataset, path, decoder, workers, batch_size])
            assert isinstance(result["rate"], float)
            assert isinstance(result["stages"], dict)
            values.append(result["rate"])
            stages[decoder] = result["stages"]
    ratio = statistics.median(gpu / cpu for cpu, gpu in zip(rates["cpu"], rates["gpu"], strict=True))
    cpu, gpu = (statistics.median(values) for values in rates.values())
    name = f"{dataset}, {workers} threads"
    print_row(f"{name}: nvJPEG, relative to libjpeg-turbo", f"{ratio:.2f} ({gpu:,.0f} and {cpu:,.0f} images/s)")
    for decoder, seconds in stages.items():
        listed = ", ".join(f"{stage} {spent:.2f}" for stage, spent in seconds.items() if spent)
        print_row(f"{name}: {decoder}, seconds per 1,000 images", listed)
    print_row(f"{name}: auto", str(run([dataset, path, "auto", workers, batch_size])["choice"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="Make the photos here, unless they are there.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        dataset, path, decoder, workers, batch_size = arguments.measure
        print(json.dumps(measure(dataset, path, decoder, int(workers), int(batch_size))), flush=True)
        # The loader process and the thread that prefetches have no end.
        os._exit(0)
    with tempfile.TemporaryDirectory() as root:
        task = Task(arguments.folder or Path(root), 1, arguments.batch_size)
        made_photos.make_photos(task, arguments.images)
        print_row("GPU", f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
        for workers in arguments.workers:
            compare("folder", task.folder, workers, arguments.rounds, arguments.batch_size)
            compare("packed", task.packed, workers, arguments.rounds, arguments.batch_size)


if __name__ == "__main__":
    main()

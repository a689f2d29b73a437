"""A packed set of 1,300,000 generated entries: time to open it, and memory of a process with the order of an epoch.

    python tests/bench/packed.py 3

Each measurement is a new process. Memory is the unique set size (USS), compared with that of 1,000 entries.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from engine.config.loader import resolve_config
from engine.data.pack.pack_file import HEADER_BYTES, PackInfo, write_index
from engine.data.sampler import PARTS, DistributedBatchSampler
from engine.data.sources.open import open_source
from engine.data.sources.packed import PackedSource

COUNTS = (1_000, 1_300_000)
IMAGES_PER_CLASS = 500
CONTENT = b"0123456789abcdef"


def write_entries(path: Path, count: int) -> None:
    """Write a packed set whose contents are no images, in random order."""
    labels = np.arange(count) // IMAGES_PER_CLASS
    names = [f"train/n{label:08d}/n{label:08d}_{number}.JPEG" for number, label in enumerate(labels.tolist())]
    offsets = np.empty(count, np.uint64)
    offsets[np.random.default_rng(0).permutation(count)] = HEADER_BYTES + len(CONTENT) * np.arange(count)
    with path.open("wb") as file:
        file.write(bytes(HEADER_BYTES) + CONTENT * count)
        file.flush()
        write_index(
            file.fileno(),
            num_train=count,
            num_val=0,
            offsets=offsets,
            sizes=np.full(count, len(CONTENT), np.uint32),
            checksums=np.full(count, zlib.crc32(CONTENT), np.uint32),
            labels=labels.astype(np.uint32),
            names=names,
            info=PackInfo(classes=tuple(f"n{label:08d}" for label in range(count // IMAGES_PER_CLASS)), encoding=None),
        )


def measure(path: Path) -> dict[str, float]:
    """Open a packed set, compute the order of an epoch and read an image. Seconds are wall and CPU time."""
    config = resolve_config(None, ["data.dataset=packed", f"data.path={path}"]).config
    gc.collect()
    process, before = psutil.Process(), psutil.Process().memory_full_info().uss
    wall, cpu = time.perf_counter(), time.process_time()
    source = open_source(config)
    assert isinstance(source, PackedSource)
    opened = {"open_s": time.perf_counter() - wall, "open_cpu_s": time.process_time() - cpu}
    wall, cpu = time.perf_counter(), time.process_time()
    counts = [source.num_images(part) for part in PARTS]
    requests = DistributedBatchSampler(*counts, 64, 0, 1, True, config.run.seed).train_requests(1)
    first = next(requests)
    ordered = {"order_s": time.perf_counter() - wall, "order_cpu_s": time.process_time() - cpu}
    source.read_encoded("train", int(first.indices[0]))
    return {**opened, **ordered, "uss_mb": (process.memory_full_info().uss - before) / 1e6}


def main(rounds: int) -> None:
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"{count}.gpk") for count in COUNTS]
        for path, count in zip(paths, COUNTS, strict=True):
            write_entries(path, count)
        results: dict[Path, list[dict[str, float]]] = {path: [] for path in paths}
        for _ in range(rounds):
            for path in paths:
                done = subprocess.run([sys.executable, __file__, path], stdout=subprocess.PIPE, check=True)
                results[path].append(json.loads(done.stdout))
        medians = [
            {key: statistics.median(round_[key] for round_ in results[path]) for key in results[path][0]}
            for path in paths
        ]
    for count, median in zip(COUNTS, medians, strict=True):
        print(f"{count:>9,} entries", *(f"{key} {value:.2f}" for key, value in median.items()))
    print(f"memory of {COUNTS[1]:,} entries: {medians[1]['uss_mb'] - medians[0]['uss_mb']:.1f} MB more")


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        main(int(sys.argv[1]))
    else:
        print(json.dumps(measure(Path(sys.argv[1]))))

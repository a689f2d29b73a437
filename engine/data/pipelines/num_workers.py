"""How many loader processes a rank starts, found by making images before any of them is started."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil

import numpy as np

from engine.data.pipelines.loader import BatchDataset
from engine.data.rng import single_torch_thread
from engine.data.sampler import BatchRequest

# How long a step is cannot be known before loader processes are started, for these must be forked before the process
# touches the device. There are as many of them as keep up with steps of this length, which few are shorter than.
MIN_STEP_SECONDS = 0.01
# What it takes to hand a batch from one process to another; one that is made in less is made where it is used.
BATCH_HANDOVER_SECONDS = 0.001
MEASUREMENT_BUDGET_SECONDS = 0.05


def measure_num_workers(dataset: BatchDataset, request: BatchRequest, max_workers: int) -> int:
    """Measured is how long this process takes to make a batch: `request`, or a part of it where the whole would take
    longer than ENOUGH_SECONDS. Nothing that is trained depends on it."""
    try:
        seconds = measure_batch_seconds(dataset, request)
    except Exception:
        # Whatever it is, it comes again where it can be told.
        return max_workers
    return 0 if seconds < BATCH_HANDOVER_SECONDS else min(max_workers, ceil(seconds / MIN_STEP_SECONDS))


def measure_batch_seconds(dataset: BatchDataset, request: BatchRequest) -> float:
    """In more and more images at once, of which the last count: the first also import and open what they need."""
    size, images, spent = len(request.indices), 1, 0.0
    with single_torch_thread():
        while True:
            began = time.perf_counter()
            dataset[replace(request, indices=np.resize(request.indices[::-1], images))]
            took = time.perf_counter() - began
            spent += took
            if images == size or (images > 1 and spent > MEASUREMENT_BUDGET_SECONDS):
                return took * size / images
            images = min(4 * images, size)

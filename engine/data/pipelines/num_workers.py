"""Choose the number of DataLoader workers or decode threads of a rank by timing how long it takes to load a batch.

`engine.training.train` calls it for `data.workers=auto`, before they start.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil

import numpy as np

from engine.data.pipelines.batch import BatchDataset
from engine.data.rng import single_torch_thread
from engine.data.sampler import BatchRequest

# Workers must be forked before the process initializes CUDA, so the real step time is not known yet. The number of
# workers is chosen to keep up with steps of this length; few models have shorter ones.
MIN_STEP_SECONDS = 0.01
# Time to send a batch from a worker to its rank. A batch that loads faster than this is loaded in the rank itself.
BATCH_HANDOVER_SECONDS = 0.001
MEASUREMENT_BUDGET_SECONDS = 0.05


def measure_num_workers(dataset: BatchDataset, request: BatchRequest, max_workers: int) -> int:
    """Return the number of workers or threads that keep up with steps of `MIN_STEP_SECONDS`, at most `max_workers`.

    The result does not affect what is trained. If loading fails it is `max_workers`.
    """
    try:
        seconds = measure_batch_seconds(dataset, request)
    except Exception:
        # The error recurs during training, where it is reported with the failing image.
        return max_workers
    return 0 if seconds < BATCH_HANDOVER_SECONDS else min(max_workers, ceil(seconds / MIN_STEP_SECONDS))


def measure_batch_seconds(dataset: BatchDataset, request: BatchRequest) -> float:
    """Return the time to load the batch of a request in this process, in seconds.

    Loads growing parts of the request and extrapolates from the last one: the first loads include imports and opening
    files. Stops early after `MEASUREMENT_BUDGET_SECONDS`.
    """
    batch_size, num_images, total_seconds = len(request.indices), 1, 0.0
    with single_torch_thread():
        while True:
            started = time.perf_counter()
            dataset[replace(request, indices=np.resize(request.indices[::-1], num_images))]
            seconds = time.perf_counter() - started
            total_seconds += seconds
            if num_images == batch_size or (num_images > 1 and total_seconds > MEASUREMENT_BUDGET_SECONDS):
                return seconds * batch_size / num_images
            num_images = min(4 * num_images, batch_size)

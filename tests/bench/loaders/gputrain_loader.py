"""gputrain's stream pipeline, up to the batch that it copies to the device, with the flip that it applies there.

The option is the dataset: "folder", "packed" or "tar".
"""

from __future__ import annotations

import itertools

from task import SIZE, Batches, Task

from engine.config.loader import resolve_config
from engine.train.data.augment.augmentation import apply_batch_params
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchLoader


def batches(task: Task, option: str) -> Batches:
    paths = {"folder": task.folder, "packed": task.packed, "tar": task.tar}
    keys: dict[str, object] = {
        "data.dataset": "folder" if option == "folder" else "webdataset",
        "data.path": paths[option],
        "data.batch_size": task.batch_size,
        "data.image_size": SIZE,
        "data.val_split": 0.01,
        "data.workers": task.cores,
        "augment.resized_crop": True,
        "augment.flip": True,
    }
    config = resolve_config(None, [f"{key}={value}" for key, value in keys.items()]).config
    source = open_source(config)
    images = model_input_format(config, source)
    num_train, num_val = source.num_images("train"), source.num_images("val")
    shares = DistributedBatchSampler(num_train, num_val, task.batch_size, 0, 1, True, 0)
    # The workers of a run serve all of its epochs.
    requests = itertools.chain.from_iterable(map(shares.train_requests, itertools.count(1)))
    for batch in BatchLoader(source, config, images, requests, task.cores):
        assert batch.augment_params is not None
        yield apply_batch_params(batch.images, batch.augment_params, may_overwrite=True)

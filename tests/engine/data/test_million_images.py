"""Memory of a dataset with 1.3 million images, compared with one of 1,000 images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.data.tar_shards import write_many_samples
from support.gputrain_command import ROOT

IMAGES = 1_300_000
MAX_MORE_BYTES = 60 << 20
# A process that opens the dataset and loads the first batches of an epoch; it prints seconds and memory.
LOAD = """
import json, resource, sys, time
import psutil
from engine.config.loader import resolve_config
from engine.data.augment.augmentation import Augmentation
from engine.data.batching import build_sampler, check_source, class_counts
from engine.data.sources.open import open_source

config = resolve_config(None, sys.argv[1:]).config
seconds = {}

def timed(name, function):
    start = time.perf_counter()
    value = function()
    seconds[name] = round(time.perf_counter() - start, 2)
    return value

source = timed("open", lambda: open_source(config))
sampler = build_sampler(config, source, 1)
check_source(config, source, sampler)
class_counts(source)
timed("fingerprint", lambda: [source.fingerprint(part) for part in ("train", "val")])
requests = sampler.requests(2)
request = timed("order", lambda: next(requests))
for _ in range(20):
    source.load(request.part, request.indices, Augmentation(config, source.format).crop_spec(1))
    request = next(requests)
print(json.dumps({
    "seconds": seconds,
    "uss": psutil.Process().memory_full_info().uss,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
}))
"""


def load(pattern: str, *overrides: str) -> dict[str, object]:
    data = ["data.dataset=webdataset", f"data.path={pattern}", "data.image_size=8", "data.batch_size=8"]
    command = [sys.executable, "-c", LOAD, *data, *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    values: dict[str, object] = json.loads(result.stdout)
    print(pattern, overrides, values)
    return values


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_million_images_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = write_many_samples(tmp_path / "few", 1000, 2)
    many = write_many_samples(tmp_path / "many", IMAGES, 147)
    load(few)
    load(many)
    for overrides in ([], ["data.shuffle=blocks"], [f"data.val_path={few}"]):
        more = int(load(many, *overrides)["uss"]) - int(load(few, *overrides)["uss"])  # type: ignore[call-overload]
        print(f"{more / 1e6:.1f} MB more")
        assert more < MAX_MORE_BYTES

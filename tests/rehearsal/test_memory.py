"""GPU memory of a run: too little for a batch, DataParallel's batches, and the search for the batch size."""

from __future__ import annotations

import re

import pytest

from engine.train.loop.batch_size import NCCL_BYTES
from support.gpu.fake_cuda import Rehearsal, run_started
from support.gpu.fake_gpu_host import gpu_line
from support.gputrain_command import read_events, read_failures
from support.messages import says

FAKE_DATA = ("data.dataset=fake", "data.fake_train=64", "data.fake_val=64", "data.image_size=128", "--epochs", "1")


@pytest.mark.rehearsal
def test_out_of_memory_on_one_gpu_names_rank_and_remedy(rehearsal: Rehearsal) -> None:
    options = ("data.dataset=fake", "data.image_size=32", "--batch-size", "256", "--epochs", "1", "--name", "small")
    memory = f"{2 << 30},{48 << 20}"
    done = rehearsal("run", "--headless", *options, "--gpus", "free:2", FAKE_CUDA_MEMORY=memory)
    assert done.returncode == 1
    assert says(done.stderr, "out-of-memory", "rank 1 ", "data.batch_size=128")
    assert read_failures(rehearsal.runs / "small") == [(1, "out-of-memory")]


@pytest.mark.rehearsal
def test_trainings_that_reserve_memory_share_a_gpu_and_a_larger_one_is_refused(rehearsal: Rehearsal) -> None:
    rehearsal.host.set_scene(gpu_line(0, used=100, total=8192), gpu_line(1, used=8000, total=8192))
    line = ("run", "--headless", "digits", "--model", "linear", "--gpus", "auto", "--min-free")
    first = rehearsal.start(*line, "4G", "--name", "first", "--epochs", "100000")
    rehearsal.wait_for_event("first", "epoch")
    done = rehearsal(*line, "3G", "--name", "second", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    started = [run_started(rehearsal.runs / name) for name in ("first", "second")]
    assert [rank["index"] for event in started for rank in event["ranks"]] == [0, 0]
    assert "warning: sharing GPUs with runs that allow it (queue.share, queue.min_free): GPU 0: " in done.stderr
    refused = rehearsal(*line, "5G", "--name", "third", "--epochs", "1")
    assert refused.returncode != 0 and says(refused.stderr, "gpu-in-use", "of memory left", "first 4 GiB")
    assert rehearsal("stop", "first").returncode == 0
    first.communicate(timeout=60)
    assert rehearsal(*line, "5G", "--name", "third", "--epochs", "1").returncode == 0


@pytest.mark.rehearsal
def test_auto_batch_size_fits_gpu_with_least_free_memory(rehearsal: Rehearsal) -> None:
    free_bytes = (2 << 30, 840 << 20)
    options = ("data.dataset=fake", "data.image_size=256", "--model", "linear", "--batch-size", "auto", "--dry-run")
    memory = ",".join(map(str, free_bytes))
    done = rehearsal("run", "--headless", *options, "--gpus", "free:2", FAKE_CUDA_MEMORY=memory)
    assert done.returncode == 0, done.stderr
    found = re.search(r"data.batch_size auto: (\d+) images per rank, about the largest batch", done.stderr)
    assert found is not None, done.stderr
    image_bytes = 4 * 3 * 256 * 256
    assert 8 <= int(found[1]) <= (0.9 * free_bytes[1] - NCCL_BYTES) / image_bytes


@pytest.mark.rehearsal
def test_auto_batch_size_trains_in_small_memory(rehearsal: Rehearsal) -> None:
    options = ("data.dataset=fake", "data.image_size=32", "data.fake_train=4096", "--epochs", "1")
    memory = str(NCCL_BYTES + (256 << 20))
    run = rehearsal.run("auto", *options, "--batch-size", "auto", "--gpus", "free:2", FAKE_CUDA_MEMORY=memory)
    assert 8 <= run_started(run)["batch_size"] < 2048
    assert read_events(run)[-1]["state"] == "finished"

"""GPU memory of a run: DataParallel's batches, and the search for the batch size."""

from __future__ import annotations

from fake_cuda import Rehearsal
from gputrain_command import read_events

FAKE_DATA = ("data.dataset=fake", "data.fake_train=64", "data.fake_val=64", "data.image_size=128", "--epochs", "1")


def test_dp_holds_share_of_batch_on_gpu_0(rehearsal: Rehearsal) -> None:
    options = ("--model", "linear", "--batch-size", "32", "--gpus", "free:2", "device.parallel=dp")
    [epoch] = [event for event in read_events(rehearsal.run("dp", *FAKE_DATA, *options)) if event["type"] == "epoch"]
    model_bytes = 4 * 3 * 128 * 128 * 10
    batch_bytes = 4 * 64 * 3 * 128 * 128
    assert batch_bytes / 2 < epoch["memory"][0]["allocated"] < 0.6 * batch_bytes + 4 * model_bytes

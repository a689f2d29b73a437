"""Runs whose JPEG files nvJPEG decodes. The fake one has the pixels of libjpeg-turbo."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.data.tar_shards import write_shard
from support.gpu.fake_cuda import Rehearsal, epochs_of, losses_of, run_started
from support.gputrain_command import read_events

pytestmark = pytest.mark.skipif(find_spec("torchcodec") is None, reason="needs torchcodec")

OPTIONS = (
    *("--model", "linear", "--batch-size", "4", "--epochs", "2"),
    *("--workers", "2", "--gpus", "free:2", "data.image_size=32", "augment.resized_crop=true", "augment.flip=true"),
    *("run.log_every=1", "data.val_resize=36"),
)
FOLDER = (*OPTIONS, "--dataset", "folder", "--data-path", "photos")


@pytest.fixture
def photos(rehearsal: Rehearsal) -> Path:
    """48 photos of two classes, every eighth of them a PNG."""
    for number in range(48):
        blocks = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        path = (
            rehearsal.folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.{'png' if number % 8 == 7 else 'jpg'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(blocks).resize((50, 40), Image.Resampling.BICUBIC).save(path)
    return rehearsal.folder / "photos"


@pytest.mark.rehearsal
@pytest.mark.parametrize("loading", [(), ("data.worker_type=processes",), ("--workers", "0")])
def test_gpu_decoder_trains_as_cpu_decoder(rehearsal: Rehearsal, photos: Path, loading: tuple[str, ...]) -> None:
    gpu, cpu = (rehearsal.run(decoder, *FOLDER, f"data.decoder={decoder}", *loading) for decoder in ("gpu", "cpu"))
    assert run_started(gpu)["decoder"] == "gpu"
    assert run_started(gpu)["decoder_reason"] == "set by data.decoder"
    assert losses_of(gpu) == pytest.approx(losses_of(cpu), rel=5e-3)


@pytest.mark.rehearsal
def test_killed_run_resumes_with_its_decoder(rehearsal: Rehearsal, photos: Path) -> None:
    whole = rehearsal.run("whole", *FOLDER, "data.decoder=gpu")
    rehearsal.inject_fault("kill the run", 0, 7, once=True)
    options = (*FOLDER, "data.decoder=gpu", "checkpoint.every_steps=1")
    assert rehearsal("run", "--headless", *options, "--name", "killed").returncode != 0
    # What decoded the images before decides, not a measurement.
    resumed = rehearsal("resume", "killed", "--headless", "data.decoder=auto")
    assert resumed.returncode == 0, resumed.stderr
    killed = rehearsal.runs / "killed"
    event = next(event for event in read_events(killed) if event["type"] == "run_resumed")
    assert (event["decoder"], event["decoder_reason"]) == ("gpu", "as before it was resumed")
    assert epochs_of(killed)[-1]["val_loss"] == epochs_of(whole)[-1]["val_loss"]


@pytest.mark.rehearsal
def test_auto_decoder_is_measured_once(rehearsal: Rehearsal, photos: Path) -> None:
    run = rehearsal.run("auto", *FOLDER)
    started = run_started(run)
    assert started["decoder"] in ("cpu", "gpu")
    assert re.fullmatch(r"nvJPEG decodes [\d,]+ images/s, 2 CPU threads [\d,]+", started["decoder_reason"])
    assert rehearsal("resume", "auto", "--headless", "run.epochs=3").returncode == 0
    resumed = next(event for event in read_events(run) if event["type"] == "run_resumed")
    assert resumed["decoder"] == started["decoder"]


@pytest.mark.rehearsal
@pytest.mark.parametrize("on_bad", ["skip", "fail"])
def test_gpu_decoder_names_image_that_cannot_be_read(rehearsal: Rehearsal, photos: Path, on_bad: str) -> None:
    damaged = bytearray((photos / "cat" / "8.jpg").read_bytes())
    # Without its first table of coefficients, which becomes a comment.
    damaged[damaged.index(b"\xff\xdb") + 1] = 0xFE
    (photos / "cat" / "8.jpg").write_bytes(damaged)
    members = [
        (f"{path.stem}{suffix}", content)
        for path in sorted(photos.rglob("*.*"))
        for suffix, content in ((path.suffix, path.read_bytes()), (".cls", b"%d" % (path.parent.name == "dog")))
    ]
    write_shard(rehearsal.folder / "train-0.tar", members)
    options = (*OPTIONS, "--dataset", "webdataset", "--data-path", "train-{0..0}.tar", "data.decoder=gpu")
    done = rehearsal(
        "run", "--headless", *options, f"data.on_bad={on_bad}", "data.drop_last=false", "--name", "damaged"
    )
    assert done.returncode == (0 if on_bad == "skip" else 1), done.stderr
    messages = [str(event.get("message")) for event in read_events(rehearsal.runs / "damaged")]
    assert any("8.jpg cannot be read" in message for message in messages), messages

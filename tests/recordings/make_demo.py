"""Generate the recordings that `gputrain-tui --demo` replays: GPUs of a fictitious server and two runs.

The images of the digits are real ones, what a model makes of them is not.

They are in `tui/screens/demo/data/`. Rerun after a change of a format: `python tests/recordings/make_demo.py`.
"""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from make_eight_gpus import BEGIN, GIB, gpu, known_reading, process, values

from engine.base.codec import FORMAT, encode
from engine.config.loader import validate_config
from engine.config.schema import Config, as_dict
from engine.config.yaml_io import to_yaml
from engine.gpus.snapshot import Gpu, Snapshot, SnapshotSource
from engine.runs.evaluations import DenseConfusion, StoredEvaluation, to_confusion
from engine.runs.events import CheckpointSaved, EpochEvent, Event, GpuEvent, RunFinished, RunStarted, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.inspection import PART_NAMES, Inspection, InspectionInfo, write_inspection
from engine.runs.journal import to_line
from engine.runs.records import GpuSample, RankDevice, RankEpochTiming
from engine.train.optim.lr_schedule import lr_factor
from support.replace import replace

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tui" / "screens" / "demo" / "data"
DIGITS = ROOT / "engine" / "train" / "data" / "sources" / "digits.npz"
HOST = "demo-server"
IMAGE_FORMAT = "224 x 224 pixels"
LOG_EVERY, GPUS_EVERY = 10, 60  # steps
SECONDS_PER_STEP, GLOBAL_BATCH_SIZE, PEAK_LR = 0.08, 512, 0.2
IMAGES_PER_CLASS = 1000
# How much harder each class is than the others, and the classes it is most often predicted as.
CLASS_DIFFICULTY = (1.5, 0.2, 1.4, 0.9, 1.5, 0.3, 2.9, 0.5, 0.3, 0.5)
CONFUSED_WITH = ((6, 3), (3, 0), (6, 4), (0, 4), (6, 2), (7, 9), (0, 4), (9, 5), (6, 0), (7, 5))
FIRST_PID = 41200
RECORDED_SECONDS = 19  # one period of the simulated load
# Index, mean utilization (%), memory (GiB), power (W), temperature (°C), user, command, run time (s), run.
GPU_TABLE = (
    (0, 97, 61.2, 612.0, 64, "alice", "python", 250, "fashion-17"),
    (1, 96, 61.0, 605.0, 63, "alice", "python", 250, "fashion-17"),
    (2, 0, 0.5, 71.0, 33, None, None, 0, None),
    (3, 0, 0.5, 70.0, 32, None, None, 0, None),
    (4, 72, 40.1, 455.0, 58, "bob", "python train.py --config big.yaml", 20_000, None),
    (5, 74, 40.1, 460.0, 88, "bob", "python train.py --config big.yaml", 20_000, None),
    (6, 12, 11.0, 140.0, 41, "carol", "jupyter-lab", 180_000, None),
)


@dataclass(frozen=True)
class Training:
    name: str
    epochs: int
    steps_per_epoch: int
    seed: int
    classes: tuple[str, ...]

    @property
    def config(self) -> Config:
        return validate_config(
            {
                "run": {"name": self.name, "epochs": self.epochs},
                "device": {"gpus": "0,1"},
                "data": {"dataset": "folder", "path": f"/data/{self.name.partition('-')[0]}", "batch_size": 256},
                "model": {"name": "resnet50"},
                "optim": {"lr": PEAK_LR, "weight_decay": 5e-4},
                "schedule": {"name": "cosine", "warmup_epochs": 2},
                "precision": {"amp": "bf16"},
            }
        )


CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
RUNS = (
    Training("fashion-17", epochs=30, steps_per_epoch=469, seed=7, classes=CLOTHES),
    Training("digits-3", epochs=6, steps_per_epoch=100, seed=3, classes=tuple("0123456789")),
)


def gpu_uuid(index: int) -> str:
    return f"GPU-{index}de0{index}de0-0000-4000-8000-{index:012d}"


def events(run: Training) -> Iterator[Event]:
    """Yield the events of a run that started at time 0."""
    rng = random.Random(run.seed)  # noqa: S311 (not for cryptography)
    norms = random.Random(run.seed)  # noqa: S311
    schedule, total, losses = run.config.schedule, run.epochs * run.steps_per_epoch, []
    ranks = [RankDevice(rank, HOST, FIRST_PID + rank, gpu_uuid(rank)) for rank in (0, 1)]
    yield RunStarted(
        format=FORMAT, time=0.0, name=run.name, host=HOST, world_size=2, devices=[gpu_uuid(0), gpu_uuid(1)],
        backend="nccl",
        epochs=run.epochs, global_batch=GLOBAL_BATCH_SIZE, steps_per_epoch=run.steps_per_epoch,
        train_images=run.steps_per_epoch * GLOBAL_BATCH_SIZE, val_images=IMAGES_PER_CLASS * len(run.classes),
        classes=len(run.classes), parameters=23_528_522, workers=8, versions={"torch": "0"}, ranks=ranks,
        batch_size=GLOBAL_BATCH_SIZE // 2, cores=16, flops=24.5e9,
        peak_tflops=2 * 989.4, trainable_parameters=23_528_522, image_format=IMAGE_FORMAT, input=IMAGE_FORMAT,
        train_size=224, pipeline="stream", pipeline_reason="set by data.pipeline", pipeline_auto=False,
        worker_type="threads", precision="bf16", start_method="fork",
    )  # fmt: skip
    rate = GLOBAL_BATCH_SIZE / SECONDS_PER_STEP
    for step in range(1, total + 1):
        now, share, epoch = step * SECONDS_PER_STEP, step / total, (step - 1) // run.steps_per_epoch + 1
        lr = round(PEAK_LR * lr_factor(schedule, step, run.steps_per_epoch, run.epochs), 6)
        noise = rng.gauss(0.03, 0.01 + 0.05 * lr)
        losses.append(round(abs(2.3 * math.exp(-9 * share) + 0.18 * (1 - share) + noise), 5))
        if step % LOG_EVERY == 0 or step == total:
            yield StepEvent(
                time=now, step=step, epoch=epoch, losses=losses, lr=lr,
                images_per_second=round(rate + rng.gauss(0, 50), 1), data_wait=0.01,
                grad_norm=round(0.5 + 3.2 * math.exp(-6 * share) + abs(norms.gauss(0, 0.25)), 4),
            )  # fmt: skip
            losses = []
        if step % GPUS_EVERY == 0:
            # The validation and the checkpoint after each epoch.
            dip = 35 if step > run.steps_per_epoch and (step - 1) % run.steps_per_epoch < GPUS_EVERY else 0
            yield GpuEvent(time=now, gpus=[gpu_use(rank, 96 + rng.randrange(3) - dip) for rank in (0, 1)])
        if step % run.steps_per_epoch == 0:
            done, seconds = epoch / run.epochs, run.steps_per_epoch * SECONDS_PER_STEP
            timings = [RankEpochTiming(rank, seconds, 0.01 * seconds, 0.3 * seconds) for rank in (0, 1)]
            yield EpochEvent(
                time=now, epoch=epoch, step=step,
                train_loss=round(2.1 * math.exp(-9 * done) + 0.17 * (1 - done) + 0.02, 5),
                train_accuracy=round(1 - 0.75 * math.exp(-7 * done) - 0.06 * (1 - done), 5),
                val_loss=round(1.9 * math.exp(-9 * done) + 0.24 + rng.gauss(0, 0.008), 5),
                val_accuracy=round(0.932 - 0.66 * math.exp(-8 * done) + rng.gauss(0, 0.004), 5),
                lr=lr, seconds=seconds, images_per_second=rate, data_wait=0.01,
                val_top5=round(1 - 0.3 * math.exp(-8 * done), 5), metrics={}, skipped_steps=0, skipped_images=0,
                train_size=224, rank_timings=timings,
            )  # fmt: skip
            yield CheckpointSaved(time=now, path=f"checkpoints/step-{step:08d}.pt", step=step, epoch=epoch + 1)
    yield RunFinished(time=total * SECONDS_PER_STEP, state="finished", message="made up")


def gpu_use(rank: int, util: int) -> GpuSample:
    return GpuSample(
        gpu_uuid(rank), HOST, "ok", util=util, sm_active=81.0 + rank, tensor_active=43.0, memory_used=int(61.2 * GIB),
        temperature=64, power=612.0, sm_clock=1980, max_sm_clock=1980, throttle=[],
    )  # fmt: skip


def evaluation(epoch: EpochEvent, num_classes: int) -> StoredEvaluation:
    """Generate an evaluation that is consistent with the accuracy of the epoch event."""
    rng = random.Random(epoch.epoch)  # noqa: S311 (not for cryptography)
    images = IMAGES_PER_CLASS * num_classes
    wrong = round((1 - epoch.val_accuracy) * images)
    counts = [
        [IMAGES_PER_CLASS * (predicted == true) for predicted in range(num_classes)] for true in range(num_classes)
    ]
    for _ in range(wrong):
        weights = [hard * (counts[true][true] > 0) for true, hard in enumerate(CLASS_DIFFICULTY)]
        true = rng.choices(range(num_classes), weights)[0]
        confused_classes = CONFUSED_WITH[true]
        predicted = rng.choice(
            [*confused_classes, *confused_classes, confused_classes[0], rng.choice(range(num_classes))]
        )
        predicted = predicted if predicted != true else confused_classes[0]
        counts[true][true] -= 1
        counts[true][predicted] += 1
    return StoredEvaluation(
        epoch=epoch.epoch,
        loss=epoch.val_loss,
        top1=1 - wrong / images,
        top5=1 - wrong / 20 / images,
        images=images,
        per_class=tuple(row[number] / IMAGES_PER_CLASS for number, row in enumerate(counts)),
        confusion=to_confusion(counts),
    )


def inspection(run: Training, evaluation: StoredEvaluation) -> Inspection:
    """Generate results of single images with the confusion matrix of an evaluation, and pictures of the mistakes."""
    rng = np.random.default_rng(run.seed)
    assert isinstance(evaluation.confusion, DenseConfusion)
    counts = np.array(evaluation.confusion.rows)
    label, predicted = np.repeat(np.indices(counts.shape).reshape(2, -1), counts.reshape(-1), axis=1)
    is_wrong = label != predicted
    # Rounded, so that the file is small.
    probability = np.where(is_wrong, 0.45 + 0.5 * rng.beta(5, 2, len(label)), 1 - 0.4 * rng.beta(1, 12, len(label)))
    probability = probability.round(2).clip(0.02, 0.99)
    second_probability = ((1 - probability) * rng.choice([0.5, 0.75, 1.0], len(label))).round(2)
    second = np.where(is_wrong, label, (label + 1) % len(run.classes))
    label_probability = np.where(is_wrong, second_probability, probability)
    rows = np.flatnonzero(is_wrong)
    with np.load(DIGITS) as digits:
        images, labels = digits["images"], digits["labels"]
    brightness = (images.astype(float) * 255 / images.max()).astype(np.uint8)
    pictures = [rng.choice(np.flatnonzero(labels == label[row])) for row in rows]
    info = InspectionInfo(
        checkpoint="best.pt", digest="", step=evaluation.epoch * run.steps_per_epoch, epoch=evaluation.epoch,
        raw=False, part="val", dataset="digits", classes=run.classes, data={}, fingerprints={},
    )  # fmt: skip
    columns = {
        "part": np.full(len(label), PART_NAMES.index("val"), np.uint8),
        "index": np.arange(len(label)),
        "label": label,
        "predicted": predicted,
        "second": second,
        "probability": probability,
        "label_probability": label_probability,
        "loss": -np.log(label_probability.clip(0.001)).round(4),
        "margin": (probability - second_probability).round(2),
    }
    return Inspection(info, columns, None, rows, brightness[pictures][..., None])


def snapshot(second: int) -> Snapshot:
    """Snapshot at one second. The readings of the last GPU are stale."""
    now = float(BEGIN + second)
    gpus = []
    for index, util, memory, power, temperature, user, command, run_time, run in GPU_TABLE:
        wave = round(6 * math.sin((second + 11) / 3 + index)) if util else 0
        readings = values(
            index, now, min(max(util + wave, 0), 100), memory_used=int(memory * GIB), temperature=temperature,
            power=power, throttle=["thermal"] if temperature > 85 else [],
        )  # fmt: skip
        processes = []
        if user is not None and command is not None:
            more = {"run": run, "rank": index if run else None, "cpu": 100.0 + wave, "run_time": run_time}
            processes.append(process(now, FIRST_PID + index, user, command, memory, **more))
        gpus.append(gpu(index, now, readings, *processes, runs=(run,) if run else ()))
    gpus.append(gpu(7, BEGIN - 4.0, values(7, BEGIN - 4.0, 0)).as_stale(4.0 + second))
    named: list[Gpu] = [replace(gpu, uuid=gpu_uuid(gpu.index)) for gpu in gpus]
    return Snapshot(
        time=now,
        host=HOST,
        source=SnapshotSource(kind="recording", made_up=True),
        driver=known_reading("580.95", now),
        cuda=known_reading("13.0", now),
        gpus=tuple(named),
    )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as gzip with modification time 0, so that the file is reproducible."""
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


if __name__ == "__main__":
    for run in RUNS:
        folder = DATA / run.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(as_dict(run.config)))
        recorded = list(events(run))
        write_lines(folder / "events.jsonl.gz", map(to_line, recorded))
        evaluations = [evaluation(event, len(run.classes)) for event in recorded if isinstance(event, EpochEvent)]
        write_lines(folder / "evaluations.json.gz", [encode({"classes": run.classes, "epochs": evaluations}).decode()])
        if run.name.startswith("digits"):
            best = max(evaluations, key=lambda evaluation: evaluation.top1)
            write_inspection(RunFolder(folder), inspection(run, best))
    write_lines(DATA / "gpus.jsonl.gz", (encode(snapshot(second)).decode() for second in range(RECORDED_SECONDS)))

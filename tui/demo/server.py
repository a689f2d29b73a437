"""A made-up server with eight GPUs and made-up runs, so that anyone can look around without a GPU. It is written as a
real one would be, a journal and snapshots, and read by the same feeds; every screen says that it is made up."""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.loader import check
from engine.config.schema import Config, as_dict
from engine.config.yaml_io import to_yaml
from engine.gpus.snapshot import UNITS, Gpu, Process, Reading, Snapshot, Source
from engine.runs.control import Asked, take_requests
from engine.runs.event_lines import line_of
from engine.runs.events import (
    CheckpointSaved,
    Continued,
    Control,
    Epoch,
    Event,
    Gpus,
    Paused,
    RunFinished,
    RunStarted,
    Step,
)
from engine.runs.folder import RunFolder
from engine.runs.journal import Journal
from engine.runs.ownership import Ownership
from engine.runs.records import GpuSample, RankDevice
from tui.demo.evaluation import write_evaluation

if TYPE_CHECKING:
    from tui.app import CockpitApp, Pace

NOTICE = "MADE UP: no such server"
HOST = "demo-server"
LIVE, DONE = "fashion-17", "digits-3"
EPOCHS, STEPS, LOG_EVERY, BATCH = 30, 469, 10, 512
DONE_EPOCHS = 6
SECONDS_A_STEP = 0.08
GIB = 2**30
MEMORY = int(79.6 * GIB)


def uuid_of(index: int) -> str:
    return f"GPU-{index}de0{index}de0-0000-4000-8000-{index:012d}"


def demo_config() -> Config:
    return check(
        {
            "run": {"name": LIVE, "epochs": EPOCHS},
            "device": {"gpus": "0,1"},
            "data": {"dataset": "fashion-mnist", "path": "/data", "batch_size": BATCH // 2},
            "model": {"name": "resnet18-small"},
            "optim": {"lr": 0.2, "weight_decay": 5e-4},
            "schedule": {"name": "cosine", "warmup_epochs": 2},
            "precision": {"amp": "bf16"},
        }
    )


def demo_events(name: str, began: float, epochs: int = EPOCHS, steps: int = STEPS, seed: int = 7) -> Iterator[Event]:
    """The events of a made-up run, each at the time at which it would come."""
    draw = random.Random(seed)  # noqa: S311 (nothing is kept secret by it)
    ranks = [RankDevice(rank, HOST, 41200 + rank, uuid_of(rank)) for rank in (0, 1)]
    yield RunStarted(
        time=began, name=name, host=HOST, world_size=2, devices=[uuid_of(0), uuid_of(1)], backend="nccl", epochs=epochs,
        global_batch=BATCH, steps_per_epoch=steps, train_images=60_000, val_images=10_000, classes=10,
        parameters=11_172_810, workers=4, versions={"torch": "0"}, ranks=ranks,
        batch_size=BATCH // 2, cores=16, least_step=0.0021, least_images=2, flops=2.62e9, peak_tflops=2 * 989.4,
    )  # fmt: skip
    total, losses = steps * epochs, []
    for step in range(1, total + 1):
        now = began + step * SECONDS_A_STEP
        share, epoch = step / total, (step - 1) // steps + 1
        rate = demo_lr(step, steps, epochs)
        losses.append(
            round(abs(2.3 * math.exp(-9 * share) + 0.18 * (1 - share) + draw.gauss(0.03, 0.01 + 0.05 * rate)), 5)
        )
        if step % LOG_EVERY == 0 or step == total:
            yield Step(
                time=now, step=step, epoch=epoch, losses=losses, lr=rate,
                images_per_second=round(31_200 + draw.gauss(0, 250), 1), data_wait=0.01,
            )  # fmt: skip
            losses = []
        if step % 60 == 0:
            yield Gpus(time=now, gpus=[_use(rank, draw) for rank in (0, 1)])
        if step % steps == 0:
            done = epoch / epochs
            yield Epoch(
                time=now, epoch=epoch, step=step, train_loss=2.1 * math.exp(-9 * done) + 0.17 * (1 - done) + 0.02,
                train_accuracy=1 - 0.75 * math.exp(-7 * done) - 0.06 * (1 - done),
                val_loss=1.9 * math.exp(-9 * done) + 0.24 + draw.gauss(0, 0.008),
                val_accuracy=0.932 - 0.66 * math.exp(-8 * done) + draw.gauss(0, 0.004),
                lr=rate, seconds=steps * SECONDS_A_STEP, images_per_second=31_200.0, data_wait=0.01,
            )  # fmt: skip
            yield CheckpointSaved(time=now, path=f"checkpoints/step-{step:08d}.pt", step=step, epoch=epoch + 1)
    yield RunFinished(time=began + total * SECONDS_A_STEP, state="finished", message="made up")


def demo_lr(step: int, steps: int, epochs: int) -> float:
    from engine.optim.lr_schedule import lr_factor

    return round(0.2 * lr_factor(demo_config().schedule, step, steps, epochs), 6)


def _use(rank: int, draw: random.Random) -> GpuSample:
    return GpuSample(
        uuid=uuid_of(rank), host=HOST, state="ok", busy=96 + draw.randrange(3), sm_active=81.0 + rank,
        tensor_active=43.0, memory_used=int(61.2 * GIB), temperature=64, power=612.0, sm_clock=1980,
        max_sm_clock=1980, throttle=[],
    )  # fmt: skip


# Index, busy at the middle, memory in GiB, watts, degrees, user, command, run.
GPUS = (
    (0, 97, 61.2, 612, 64, "alice", "python", LIVE),
    (1, 96, 61.0, 605, 63, "alice", "python", LIVE),
    (2, 0, 0.5, 71, 33, None, None, None),
    (3, 0, 0.5, 70, 32, None, None, None),
    (4, 72, 40.1, 455, 58, "bob", "python train.py --config big.yaml", None),
    (5, 74, 40.1, 460, 88, "bob", "python train.py --config big.yaml", None),
    (6, 12, 11.0, 140, 41, "carol", "jupyter-lab", None),
    (7, None, None, None, None, None, None, None),
)


def demo_snapshot(now: float, tick: int) -> Snapshot:
    """What the made-up driver tells at one look; the last GPU does not answer."""
    told: Reading[str] = Reading("580.95", now)
    return Snapshot(
        now, HOST, told, Reading("13.0", now), tuple(_gpu(now, tick, *one) for one in GPUS),
        source=Source("recording", made_up=True),
    )  # fmt: skip


def _gpu(
    now: float, tick: int, index: int, busy: int | None, memory: float | None, watts: int | None, degrees: int | None,
    user: str | None, command: str | None, run: str | None,
) -> Gpu:  # fmt: skip
    silent = busy is None
    wave = round(6 * math.sin(tick / 3 + index)) if busy else 0
    load = None if busy is None else min(max(busy + wave, 0), 100)
    values: dict[str, object] = {
        "name": "NVIDIA H100 80GB HBM3", "pci_bus_id": f"0000:{index:02x}:00.0", "busy": load,
        "sm_active": None if load is None else load * 0.84, "tensor_active": None if load is None else load * 0.45,
        "dram_active": None if load is None else load * 0.4, "memory_total": MEMORY,
        "memory_used": None if memory is None else int(memory * GIB), "temperature": degrees, "power": watts,
        "power_limit": 700, "sm_clock": 1980 if busy else 345, "max_sm_clock": 1980, "performance_state": "P0",
        "throttle": ["thermal"] if degrees is not None and degrees > 85 else [], "pcie_generation": 5, "pcie_width": 16,
    }  # fmt: skip
    reason = "stale: no answer for 4 s" if silent else "not part of this demonstration"
    readings = {name: Reading(values.get(name), now, None if name in values else reason) for name in UNITS}
    processes = []
    if user is not None and memory is not None:
        rank = index if run else None
        processes.append(
            Process(
                41200 + index,
                "compute",
                None,
                Reading(user, now),
                Reading(command, now),
                Reading(int(memory * GIB), now),
                Reading(100.0 + wave, now),
                Reading(5 * GIB, now),
                run,
                rank,
            )
        )
    listed: Reading[tuple[Process, ...]] = Reading(
        None if silent else tuple(processes), now, reason if silent else None
    )
    state = "stale" if silent else "ok"
    return Gpu(index, uuid_of(index), state, 4.0 if silent else 0.0, now, readings, listed, (), (run,) if run else ())  # type: ignore[arg-type]


class DemoMonitor:
    """Tells a made-up snapshot a second."""

    def __init__(self, period: float) -> None:
        self._period, self._tick = period, 0

    def read(self, seconds: float) -> Snapshot | None:
        time.sleep(min(seconds, self._period) if self._tick else 0.0)
        self._tick += 1
        return self.latest()

    def latest(self) -> Snapshot:
        return demo_snapshot(time.time(), self._tick)

    def close(self) -> None:
        """There is nothing to close."""


def write_run(root: Path, name: str, events: Iterator[Event], until: float) -> tuple[RunFolder, Iterator[Event]]:
    """A run's folder with its events up to a time, and those that come later."""
    folder = RunFolder(root / name)
    for path in (folder.path, folder.control, folder.checkpoints):
        path.mkdir(parents=True)
    config = demo_config()
    folder.config.write_text(
        to_yaml(as_dict(config.model_copy(update={"run": config.run.model_copy(update={"name": name})})))
    )
    folder.lock.touch()
    journal = Journal(folder.journal)
    lines, epochs = [], []
    for event in events:
        if event.time > until:
            later = event
            break
        journal.append(event)
        if isinstance(event, Epoch):
            epochs.append(event)
        if (line := line_of(event)) is not None:
            lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.time))}  {line}\n")
    else:
        later = None
    journal.close()
    write_evaluation(folder.evaluation, epochs)
    folder.log.write_text("".join(lines))
    return folder, _with_first(later, events)


def _with_first(first: Event | None, rest: Iterator[Event]) -> Iterator[Event]:
    if first is not None:
        yield first
        yield from rest


class Demo:
    """The made-up server: a folder of runs that is gone with it, and a thread that writes the one that is live."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gputrain-demo-"))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train, name="demo", daemon=True)

    def __enter__(self) -> Demo:
        now = time.time()
        write_run(self.root, DONE, demo_events(DONE, now - 7200, DONE_EPOCHS, 100, seed=3), now)
        os.utime(self.root / DONE / "events.jsonl", (now - 7000, now - 7000))
        os.utime(self.root / DONE / "lock", (now - 7000, now - 7000))
        os.utime(self.root / DONE / "config.yaml", (now - 7200, now - 7200))
        began = now - 6.6 * STEPS * SECONDS_A_STEP
        self._folder, self._coming = write_run(self.root, LIVE, demo_events(LIVE, began), now)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2.0)
        shutil.rmtree(self.root, ignore_errors=True)

    def app(self, pace: Pace) -> CockpitApp:
        from tui.app import CockpitApp
        from tui.pollers import GpuFeed

        return CockpitApp(self.root, pace=pace, gpus=GpuFeed(pace.look, DemoMonitor(pace.look)), demo=NOTICE)

    def _train(self) -> None:
        """Append what is due, hold and stop as it is asked to."""
        ownership = Ownership(self._folder)
        journal = Journal(self._folder.journal)
        asked, held, step, epoch, paused = Asked(), 0.0, 0, 0, False
        epochs = self._folder.history().epochs

        def tell(event: Event) -> None:
            journal.append(event)
            if (line := line_of(event)) is not None:
                with self._folder.log.open("a") as log:
                    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

        coming = next(self._coming, None)
        while coming is not None and not self._ended.wait(0.2):
            ownership.beat()
            for request in take_requests(self._folder.control):
                before = asked.checkpoints
                tell(Control(request=request.request, by=request.by, outcome=asked.take(request.request)))
                if asked.checkpoints > before:
                    tell(CheckpointSaved(path=f"checkpoints/step-{step:08d}.pt", step=step, epoch=epoch, asked=True))
            if asked.paused != paused:
                paused = asked.paused
                tell(Paused(step=step, epoch=epoch) if paused else Continued(step=step, epoch=epoch))
            if asked.stop:
                tell(RunFinished(state="stopped", message="made up, and so cannot be resumed"))
                break
            if paused:
                held += 0.2
            while coming is not None and not paused and coming.time + held <= time.time():
                if isinstance(coming, Step):
                    step, epoch = coming.step, coming.epoch
                tell(coming)
                if isinstance(coming, Epoch):
                    epochs.append(coming)
                    write_evaluation(self._folder.evaluation, epochs)
                coming = next(self._coming, None)
        journal.close()
        with suppress(OSError):
            ownership.release()

"""A server for the benchmark of the screens: eight GPUs of the fake driver under varying load, and runs of every kind.

One run is in training. The others have what the screens show: a sweep, curves to compare, profiles, results of images,
a long log, interrupted runs in the queue, and runs in the trash.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.config.yaml_io import to_yaml
from engine.jobs.queue.state import write_queue_state
from engine.runs.events import GpuEvent, RunFinished, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.inspection import write_inspection
from engine.runs.journal import Journal
from engine.runs.ownership import Ownership
from engine.runs.records import GpuSample, RankDevice
from support.gpu.fake_gpu_host import FakeGpuHost, build_fake_driver, gpu_line, gpu_uuid
from support.json_files import write_json
from support.replace import replace
from support.runs.compared_runs import make_compared_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_queue_state, make_run_folder
from support.runs.inspections import CLASSES, make_inspection
from support.runs.profiles import PROFILE, store_profile
from support.runs.sweeps import make_finished_trials

GPUS, RANKS = 8, 4
LIVE_RUN, SHOWN_RUN, COMPARED_RUNS, SWEEP = "live", "inspected", "compared", "search"
MEMORY_MIB, MEMORY_SHOWN = 61000, r"59\.[56]|61000MiB"
EPOCHS, STEPS_PER_EPOCH, LOG_EVERY, STEP_SECONDS = 30, 400, 10, 0.05
COMPARED, COMPARED_EPOCHS, INTERRUPTED, LOG_LINES, IMAGES, PROFILES = 4, 40, 20, 500, 60, 3


class BusyServer:
    """Builds the runs in `folder`; as a context it trains. `runs` counts the ended runs that have nothing special."""

    def __init__(self, folder: Path, runs: int) -> None:
        self.root, self.runs = folder / "runs", runs
        self._host = FakeGpuHost(folder, build_fake_driver(folder))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        state = {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CONFIG", "CACHE")}
        self.environment = kept | self._host.environment | state | {"GPUTRAIN_RUNS": str(self.root)}
        self._config = to_yaml(as_dict(validate_config({})))
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._train, name="server", daemon=True)
        self._set_load(0.0)
        self._make_special_runs()
        for number in range(runs):
            self._make_ended_run(f"run-{number:05d}", number)
        self._make_live_run()

    def _set_load(self, now: float) -> None:
        util = [round(70 + 25 * math.sin(now / 3 + index)) if index < 6 else 0 for index in range(GPUS)]
        lines = [
            gpu_line(
                index, name="NVIDIA_H100_80GB_HBM3", util=load, sm=round(0.8 * load), tensor=round(0.4 * load),
                used=MEMORY_MIB, power=100 + 5 * load, temperature=30 + load // 3, memory_util=load // 2,
            )
            for index, load in enumerate(util)
        ]  # fmt: skip
        self._host.set_scene(lines, [f"process {index} {os.getpid()} 60000 compute" for index in range(6)])

    def _make_ended_run(self, name: str, number: int = 1) -> RunFolder:
        started = replace(make_run_started(time.time() - 600), name=name)
        epochs = [make_epoch(epoch, 0.3 * epoch, time.time() - 500) for epoch in (1, 2, 3)]
        end = RunFinished(time=time.time() - 400, state="failed" if number % 7 == 0 else "finished", message="")
        folder = make_run_folder(self.root, name, started, *epochs, end)
        folder.config.write_text(self._config)
        return folder

    def _make_special_runs(self) -> None:
        make_finished_trials(self.root, name=SWEEP)
        for seed in range(COMPARED):
            make_compared_run(self.root, f"{COMPARED_RUNS}-{seed}", seed=seed, lr=0.1 + seed, epochs=COMPARED_EPOCHS)
        for number in range(INTERRUPTED):
            folder = make_run_folder(self.root, f"waiting-{number}")
            folder.config.write_text(self._config)
            write_queue_state(folder, make_queue_state(position=float(number), submitted_at=time.time() - 900))
        shown = self._make_ended_run(SHOWN_RUN)
        shown.log.write_text("".join(f"12:00:00 step {line}: loss {1 / (line + 1):.4f}\n" for line in range(LOG_LINES)))
        for number in range(PROFILES):
            store_profile(shown, replace(PROFILE, step=120 + number))
        counts = [[15, 3, 2], [4, 16, 0], [1, 5, 14]]
        result = {
            "epoch": 3, "loss": 0.9, "top1": 0.75, "top5": 1.0, "images": 60, "per_class": [0.75, 0.8, 0.7],
            "confusion": {"layout": "dense", "rows": counts},
        }  # fmt: skip
        write_json(shown.evaluation, {"format": 1, "classes": CLASSES, "last": result, "best": result})
        scores = [(0.2 + 0.01 * (index % 9), 0.5, 0.3 - 0.01 * (index % 9)) for index in range(IMAGES)]
        paths = [f"{CLASSES[index % 3]}/{index}.png" for index in range(IMAGES)]
        info = {"root": "/photos", "part": "val", "time": time.time()}
        write_inspection(shown, make_inspection(scores, [index % 3 for index in range(IMAGES)], paths=paths, info=info))

    def _make_live_run(self) -> None:
        self._devices = [gpu_uuid(rank) for rank in range(RANKS)]
        ranks = [RankDevice(rank, os.uname().nodename, os.getpid(), uuid) for rank, uuid in enumerate(self._devices)]
        live = replace(
            make_run_started(time.time() - 300), name=LIVE_RUN, world_size=RANKS, devices=self._devices, ranks=ranks,
            epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH,
        )  # fmt: skip
        self._live = make_run_folder(self.root, LIVE_RUN, live)
        self._live.config.write_text(self._config)
        for folder in (self._live.control, self._live.checkpoints):
            folder.mkdir()

    def __enter__(self) -> BusyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()

    def _train(self) -> None:
        """Log a step event every half second, epochs in between, and change the load of the GPUs every second."""
        journal, ownership, step = Journal(self._live.journal), Ownership(RunFolder(self._live.path)), 0
        for _ in range(EPOCHS // 3 * STEPS_PER_EPOCH // LOG_EVERY):
            step = self._log_step(journal, step)
        while not self._stop_event.wait(LOG_EVERY * STEP_SECONDS):
            step = self._log_step(journal, step)
            if step % (2 * LOG_EVERY) == 0:
                self._set_load(time.time())
                ownership.renew_heartbeat()
        journal.close()
        ownership.release()

    def _log_step(self, journal: Journal, step: int) -> int:
        losses = [2.0 * math.exp(-(step + index) / 2000) + 0.1 * math.sin(step + index) for index in range(LOG_EVERY)]
        step += LOG_EVERY
        epoch = (step - 1) // STEPS_PER_EPOCH + 1
        journal.append(StepEvent(step=step, epoch=epoch, losses=losses, lr=0.1, images_per_second=30e3, data_wait=0.01))
        if step % (6 * LOG_EVERY) == 0:
            samples = [
                GpuSample(uuid, os.uname().nodename, "ok", util=95, memory_used=MEMORY_MIB << 20, power=600.0)
                for uuid in self._devices
            ]
            journal.append(GpuEvent(gpus=samples))
        if step % STEPS_PER_EPOCH == 0:
            journal.append(replace(make_epoch(epoch, 1 - 1 / (epoch + 1), time.time()), step=step))
        return step

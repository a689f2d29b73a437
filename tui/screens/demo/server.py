"""Replays a simulated server for `gputrain-tui --demo`: eight GPUs and two runs, to try the screens without a GPU.

`tests/recordings/make_demo.py` generates the recordings in `data/`. The pollers read the replayed files like those of a
real server; every screen shows `DEMO_NOTICE`.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from engine.base import codec
from engine.base.codec import Record, decode, write_record
from engine.gpus.recording import RecordingMonitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.runs.control import RequestCounters, consume_requests
from engine.runs.evaluations import EvaluationFile, StoredEvaluation
from engine.runs.event_lines import event_line
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    RunContinued,
    RunFinished,
    RunPaused,
    StepEvent,
)
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal import Journal, from_line
from engine.runs.ownership import Ownership
from engine.runs.run_config import read_changed_config
from engine.runs.run_record import write_summary

DEMO_NOTICE = "DEMO: simulated server"
DATA = Path(__file__).with_name("data")
LIVE_RUN, FINISHED_RUN = "fashion-17", "digits-3"
LIVE_AGE_SECONDS = 248.0
"""Training time of the live run when the demo opens: six of its thirty epochs."""
DONE_AGE_SECONDS = 7300.0
REPLAY_INTERVAL_SECONDS = 0.2
GPU_PAST_SECONDS, GPU_PAST_INTERVAL_SECONDS = 600, 2
"""Past of the GPUs that the demo opens with."""


class RecordedEvaluations(Record, frozen=True, kw_only=True):
    """The class names of a recorded run, and the evaluation of each epoch."""

    classes: tuple[str, ...]
    epochs: tuple[StoredEvaluation, ...]


def recorded(name: str) -> str:
    """Return the text of a gzip file in `DATA`."""
    return gzip.decompress((DATA / f"{name}.gz").read_bytes()).decode()


def recorded_events(recording: str, start_time: float) -> list[Event]:
    """Return the events of a recorded run, shifted to start at `start_time` (Unix seconds)."""
    events = map(from_line, recorded(f"{recording}/events.jsonl").splitlines())
    return [codec.replace(event, time=event.time + start_time) for event in events if event is not None]


class ReplayedRun:
    """A new run folder that receives the events of a recorded run."""

    def __init__(self, folder: RunFolder, recording: str, past_events: Sequence[Event]) -> None:
        """Create the folder with the `past` events in its journal."""
        self.folder = folder
        for path in (folder.path, folder.control, folder.checkpoints):
            path.mkdir(parents=True)
        shutil.copyfile(DATA / recording / "config.yaml", folder.config)
        with suppress(FileNotFoundError):
            shutil.copyfile(DATA / recording / "inspection.npz", folder.inspection)
        folder.lock.touch()
        self._evaluations = decode(recorded(f"{recording}/evaluations.json"), RecordedEvaluations)
        self._journal, self._history = Journal(folder.journal), History()
        self._config = read_changed_config(folder.config)
        self.append(*past_events)

    def append(self, *events: Event) -> None:
        """Append events to the journal, and update the log, the record and `evaluation.json` accordingly."""
        with self.folder.log.open("a", encoding="utf-8") as log:
            for event in events:
                self._journal.append(event)
                self._history.add(event)
                if (line := event_line(event)) is not None:
                    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.time))}  {line}\n")
        if epochs := [event.epoch for event in events if isinstance(event, EpochEvent)]:
            evaluated = self._evaluations.epochs[: max(epochs)]
            best = max(evaluated, key=lambda evaluation: evaluation.top1 or 0.0)
            content = EvaluationFile(classes=self._evaluations.classes, last=evaluated[-1], best=best)
            write_record(self.folder.evaluation, content)
        write_summary(self.folder.summary, self._history.record(self._config))

    def close(self) -> None:
        self._journal.close()


class DemoServer:
    """A context manager with a temporary runs folder, a thread that continues its live run, and replayed GPUs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gputrain-demo-"))
        self.runs_dir, self.reservations = self._folder / "runs", self._folder / "reservations"
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._continue_live_run, name="demo", daemon=True)

    def __enter__(self) -> DemoServer:
        now = time.time()
        finished = recorded_events(FINISHED_RUN, now - DONE_AGE_SECONDS)
        run = ReplayedRun(RunFolder(self.runs_dir / FINISHED_RUN), FINISHED_RUN, finished)
        run.close()
        for path in (run.folder.journal, run.folder.lock):
            os.utime(path, (now, finished[-1].time))
        os.utime(run.folder.config, (now, finished[0].time))
        events = recorded_events(LIVE_RUN, now - LIVE_AGE_SECONDS)
        past_events = [event for event in events if event.time <= now]
        self._upcoming = events[len(past_events) :]
        self._live = ReplayedRun(RunFolder(self.runs_dir / LIVE_RUN), LIVE_RUN, past_events)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join(2.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def gpu_monitor(self, interval_s: float) -> RecordingMonitor:
        """Return a monitor that replays the recorded GPUs in a loop."""
        path = self._folder / "gpus.jsonl"
        path.write_text(recorded("gpus.jsonl"))
        return RecordingMonitor(path, SamplerOptions(period=interval_s).stale_after_s)

    def past_gpus(self) -> Iterator[Snapshot]:
        """Yield snapshots of the time before the demo opened: the recording, repeated.

        The last GPU, which does not answer in the recording, did what the one before it did.
        """
        recording, now = [decode(line, Snapshot) for line in recorded("gpus.jsonl").splitlines()], time.time()
        for seconds in range(GPU_PAST_SECONDS, 0, -GPU_PAST_INTERVAL_SECONDS):
            snapshot = recording[-seconds % len(recording)]
            *others, neighbor, silent = snapshot.gpus
            if seconds >= silent.age:
                silent = codec.replace(neighbor, index=silent.index, uuid=silent.uuid, time=now - seconds)
            yield codec.replace(snapshot, time=now - seconds, gpus=(*others, neighbor, silent))

    def _continue_live_run(self) -> None:
        """Append events when they are due; answer checkpoint, pause, continue and stop requests."""
        run, counters, paused, step, epoch, paused_s = self._live, RequestCounters(), False, 0, 0, 0.0
        ownership = Ownership(run.folder)
        while self._upcoming and not self._stop_event.wait(REPLAY_INTERVAL_SECONDS):
            ownership.renew_heartbeat()
            for request in consume_requests(run.folder.control):
                checkpoints = counters.checkpoints
                outcome = counters.apply(request.request, request.steps)
                run.append(ControlEvent(request=request.request, by=request.by, outcome=outcome))
                if counters.checkpoints > checkpoints:
                    path = f"checkpoints/step-{step:08d}.pt"
                    run.append(CheckpointSaved(path=path, step=step, epoch=epoch, requested=True))
            if counters.paused != paused:
                paused = counters.paused
                run.append(RunPaused(step=step, epoch=epoch) if paused else RunContinued(step=step, epoch=epoch))
            if counters.stop:
                run.append(RunFinished(state="stopped", message="simulated run; it cannot be resumed"))
                break
            if paused:
                paused_s += REPLAY_INTERVAL_SECONDS
                continue
            while self._upcoming and self._upcoming[0].time + paused_s <= time.time():
                event = self._upcoming.pop(0)
                if isinstance(event, StepEvent):
                    step, epoch = event.step, event.epoch
                run.append(codec.replace(event, time=event.time + paused_s))
        run.close()
        with suppress(OSError):
            ownership.release()

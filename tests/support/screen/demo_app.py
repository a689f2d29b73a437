"""The demo app with frozen clocks, so that snapshots are reproducible, and helpers to wait for and read screens."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from textual.pilot import Pilot
from textual.widget import Widget

from engine.base.codec import decode
from engine.gpus.recording import shift_times
from engine.gpus.snapshot import DRIVER, UNITS, Measurement, Snapshot
from engine.runs.events import RankFailed, RunFinished, RunStarted
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from engine.runs.run_record import read_run_record, write_summary
from support.replace import replace
from tui.charts.history import GpuLoads
from tui.screens.app import GputrainApp
from tui.screens.demo.server import DEMO_NOTICE, FINISHED_RUN, LIVE_RUN, ReplayedRun, recorded, recorded_events
from tui.screens.pollers.host import GpuPoller, HostLoad, HostPoller
from tui.screens.run import RunScreen

DEMO_START_TIME = 1_760_000_000.0
# The live run is in the middle of its 19th epoch.
FROZEN_NOW = DEMO_START_TIME + 698.0
PAST_SECONDS, PAST_INTERVAL_SECONDS = 600, 5
NO_GPU_REASON = "nvml shared library not found"


class FrozenGpuFeed(GpuPoller):
    """Poller that always returns the same snapshot, with ten minutes of past loads. It records nothing."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        # With the default snapshot, the past is the same in every test.
        self.loads = default_loads() if snapshot == demo_snapshot(FROZEN_NOW) else past_loads(snapshot)

    def poll(self) -> None:
        self._stop_event.wait(0.2)


class FrozenHost(HostPoller):
    """Poller whose load of the host is always the same. It records nothing."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.value = HostLoad(37.0, 12 << 30, 64 << 30, 1_300 << 30)

    def poll(self) -> None:
        self._stop_event.wait(0.2)


def past_loads(snapshot: Snapshot) -> GpuLoads:
    loads = GpuLoads()
    for past in past_snapshots(snapshot):
        loads.record(past)
    return loads


@cache
def default_loads() -> GpuLoads:
    return past_loads(demo_snapshot(FROZEN_NOW))


def past_snapshots(latest: Snapshot) -> Iterator[Snapshot]:
    """Yield snapshots of the ten minutes before `latest`, and `latest`. A GPU that is stale answered until then."""
    for seconds in range(PAST_SECONDS, 0, -PAST_INTERVAL_SECONDS):
        gpus = []
        for gpu in latest.gpus:
            load = max(0.8 + 0.2 * math.sin(seconds / 45 + gpu.index) - 0.7 * (seconds > 520), 0.0)
            source = latest.gpus[0] if gpu.state == "stale" else gpu
            changed = {
                name: replace(source[name], value=source.value(name) * load)
                for name in ("util", "sm_active", "tensor_active", "memory_used", "power")
                if source.value(name) is not None
            }
            if seconds > gpu.age:
                answered = latest.time - seconds
                past = replace(gpu, state="ok", age=0.0, time=answered, processes=source.processes)
                gpus.append(replace(past, **({name: source[name] for name in UNITS} | changed)))
        yield replace(latest, time=latest.time - seconds, gpus=tuple(gpus))
    yield latest


def no_gpu_feed() -> FrozenGpuFeed:
    unknown: Measurement[str] = Measurement(None, FROZEN_NOW, NO_GPU_REASON)
    return FrozenGpuFeed(
        Snapshot(
            time=FROZEN_NOW, source=DRIVER, host="a-host", driver=unknown, cuda=unknown, error=NO_GPU_REASON, gpus=()
        )
    )


def demo_runs(root: Path) -> list[Ownership]:
    """Create a live, a finished and a failed run in `root`. Return the ownerships that keep the live run alive."""
    shutil.copytree(demo_runs_template().name, root)
    for name, seconds in ((LIVE_RUN, 0), (FINISHED_RUN, 9000), ("cifar-4", 200_000)):
        run = RunFolder(root / name)
        for path in (run.journal, run.lock, run.config):
            os.utime(path, (time.time() - seconds, time.time() - seconds))
        record = read_run_record(run)
        assert record is not None
        when = round(time.time()) - seconds
        write_summary(run.summary, replace(record, started_at=when, updated_at=when))
    return [Ownership(RunFolder(root / LIVE_RUN))]


@cache
def demo_runs_template() -> tempfile.TemporaryDirectory[str]:
    """Folder with the demo runs, written once per process and removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="gputrain-test-")
    root = Path(folder.name)
    ReplayedRun(
        RunFolder(root / FINISHED_RUN), FINISHED_RUN, recorded_events(FINISHED_RUN, DEMO_START_TIME - 9000)
    ).close()
    device, cause = gpu_uuid(1), "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.1 GiB, 1.2 GiB are free."
    message = f"rank 1 on GPU-1: {cause}; lower data.batch_size, then resume with `gputrain resume cifar-4`"
    failed = [
        RankFailed(time=DEMO_START_TIME - 5881, rank=1, device=device, cause=cause, code="out-of-memory"),
        RunFinished(time=DEMO_START_TIME - 5880, state="failed", message=message),
    ]
    failed_events = [
        event for event in recorded_events(LIVE_RUN, DEMO_START_TIME - 6000) if event.time < DEMO_START_TIME - 5880
    ]
    failed_events = [
        replace(event, name="cifar-4", epochs=20) if isinstance(event, RunStarted) else event for event in failed_events
    ]
    ReplayedRun(RunFolder(root / "cifar-4"), LIVE_RUN, [*failed_events, *failed]).close()
    past_events = [event for event in recorded_events(LIVE_RUN, DEMO_START_TIME) if event.time <= FROZEN_NOW]
    ReplayedRun(RunFolder(root / LIVE_RUN), LIVE_RUN, past_events).close()
    return folder


@cache
def gpu_uuid(index: int) -> str:
    """Return the UUID of a GPU of the demo server."""
    return str(demo_snapshot(FROZEN_NOW).gpus[index].uuid)


@cache
def demo_snapshot(time: float) -> Snapshot:
    """First snapshot of the demo recording, shifted to `time` (Unix seconds)."""
    snapshot = decode(recorded("gpus.jsonl").partition("\n")[0], Snapshot)
    return shift_times(snapshot, time - snapshot.time)


def with_first_gpu_idle(snapshot: Snapshot) -> Snapshot:
    first, *others = snapshot.gpus
    return replace(snapshot, gpus=(replace(first, util=replace(first.util, value=0)), *others))


def demo_app(
    root: Path, gpus: GpuPoller | None = None, demo: str | None = DEMO_NOTICE, run: str | None = None
) -> GputrainApp:
    feed = gpus or FrozenGpuFeed(demo_snapshot(FROZEN_NOW))
    return GputrainApp(
        root,
        gpu_poller=feed,
        host_poller=FrozenHost(),
        demo_notice=demo,
        first=partial(GputrainApp.open_run, folder=str(root / run)) if run else None,
    )


async def wait_until_idle(pilot: Pilot[None]) -> None:
    """Wait until the screen has read and drawn all pending events."""
    app = pilot.app
    assert isinstance(app, GputrainApp)
    await wait_until(pilot, lambda: app.run_list_poller.complete or not getattr(app.screen, "shows_runs", False))
    if isinstance(screen := app.screen, RunScreen):
        await wait_until(pilot, lambda: screen.poller.caught_up)
    for name in ("sweep_poller", "queue_poller"):
        watched = getattr(app.screen, name, None)
        if watched is not None:
            await wait_until(pilot, lambda watched=watched: watched.has_polled)
    await pilot.pause()
    for name in ("validate_now", "draw_charts", "update_content"):
        update: Callable[[], None] | None = getattr(app.screen, name, None)
        if update is not None:
            update()
    await app.workers.wait_for_complete()
    await pilot.pause()
    await pilot.pause()


async def wait_until(pilot: Pilot[None], condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await pilot.pause(0.02)


def toasts(pilot: Pilot[None]) -> list[str]:
    """The messages of the toasts, the latest one last."""
    return [str(notification.message) for notification in pilot.app._notifications]


def visible_text(pilot: Pilot[None], selector: str = "Screen") -> str:
    """Text that the terminal shows in the region of a widget."""
    screen = pilot.app.screen
    region = screen.region if selector == "Screen" else screen.query_one(selector).region
    lines = ["".join(segment.text for segment in strip) for strip in screen._compositor.render_strips()]
    return "\n".join(line[region.x : region.right] for line in lines[region.y : region.bottom])


def clipped_widgets(screen: Widget) -> list[str]:
    """Return the panels and controls that extend beyond the window or their scrollable region."""
    clipped = []
    for widget in screen.query("Lines, ChartPanel, Keys, #title, #plan, #command, #about, #progress, .dialog"):
        if widget.display and widget.region and not screen.region.contains_region(widget.region):
            clipped.append(f"{widget} {widget.region}")
    for control in screen.query("Chooser, TextEntry"):
        if control.display and control.region.width and control.region.right > screen.region.right:
            clipped.append(f"{control} {control.region}")
    return clipped

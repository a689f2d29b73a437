"""The start of the screen: what runs before the first frame, and what the first frame waits for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from engine.gpus.snapshot import Snapshot
from support.gputrain_command import Gputrain
from support.screen.demo_app import FROZEN_NOW, demo_snapshot, visible_text, wait_until
from support.screen.terminal import Terminal
from tui.screens.app import GputrainApp
from tui.screens.pollers.host import GpuPoller
from tui.screens.pollers.watched import RefreshIntervals


class OneSnapshotPoller(GpuPoller):
    """Publishes one snapshot when `arrived` is set, and then no other."""

    def __init__(self) -> None:
        super().__init__()
        self.next: Snapshot | None = None
        self.polls = 0

    def poll(self) -> None:
        self._stop_event.wait(0.02)
        self.snapshot = self.next
        self.polls += 1


def test_tui_starts_gpu_sampler_before_it_imports_textual(gputrain: Gputrain) -> None:
    program = (
        "import sys, engine.gpus.start_sampler as start\n"
        "start.prestart_sampler = lambda: sys.exit(f'textual imported: {\"textual\" in sys.modules}')\n"
        "sys.argv = ['gputrain-tui']\n"
        "import tui; tui.screen()"
    )
    terminal = Terminal(gputrain, sys.executable, "-c", program)
    terminal.wait_for("textual imported: False")
    terminal.wait_for_end()
    terminal.hang_up()


def test_monitor_shows_first_snapshot_when_it_arrives(tmp_path: Path) -> None:
    feed = OneSnapshotPoller()

    async def main() -> None:
        # The refresh interval is longer than the test may take.
        app = GputrainApp(tmp_path, gpu_poller=feed, intervals=RefreshIntervals(poll_s=1000.0))
        async with app.run_test(size=(120, 34)) as pilot:
            await wait_until(pilot, lambda: feed.polls > 1)
            await pilot.pause()
            assert "carol" not in visible_text(pilot)
            feed.next = demo_snapshot(FROZEN_NOW)
            await wait_until(pilot, lambda: "carol" in visible_text(pilot))

    asyncio.run(main())

"""The preview of a run: when what is read of it is drawn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from textual.app import ComposeResult

from engine.runs.journal import Journal
from engine.runs.run_row import read_row
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from tui.tables.preview import RunPreview
from tui.terminal_app import TerminalApp
from tui.widgets.preview import Preview


class OnePreview(TerminalApp):
    def compose(self) -> ComposeResult:
        yield Preview()


def test_preview_draws_first_reading_at_once_and_more_with_next_refresh(tmp_path: Path) -> None:
    now = time.time()
    folder = make_run_folder(tmp_path, "run", make_run_started(now), make_epoch(1, 0.5, now))

    async def drive() -> None:
        app = OnePreview()
        async with app.run_test(size=(100, 40)) as pilot:
            preview, row = app.query_one(Preview), read_row(folder)

            async def wait_for(before: RunPreview | None) -> RunPreview:
                for _ in range(1000):
                    if (read := preview.preview) is not None and read is not before:
                        break
                    await pilot.pause(0.01)
                # What has been posted is processed.
                await pilot.pause()
                assert read is not None and read is not before
                return read

            preview.show_run(row)
            first = await wait_for(None)
            assert preview._drawn_preview is first
            journal = Journal(folder.journal)
            journal.append(make_epoch(2, 0.75, now + 1))
            journal.close()
            preview._poller.request_poll()
            more = await wait_for(first)
            assert preview._drawn_preview is first
            preview.show_run(row)
            assert preview._drawn_preview is more

    asyncio.run(drive())

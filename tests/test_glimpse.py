"""A run's newest state without the whole of its journal."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from test_journal import epoch, started
from test_runs import make_run

from engine.runs.events import GpuEvent, RunContinued, RunFinished, RunPaused, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.records import GpuSample
from engine.runs.watcher import INITIAL_TAIL_BYTES, MAX_FULL_READ_BYTES, RunWatcher


@cache
def lines(count: int, first: int = 1) -> str:
    def line(step: int) -> str:
        losses = [0.5] * 10
        one = StepEvent(time=1.0, step=step, epoch=1, losses=losses, lr=0.1, images_per_second=1.0, data_wait=0.0)
        return to_line(one) + "\n"

    return "".join(line(step) for step in range(first * 10, (first + count) * 10, 10))


def append(folder: RunFolder, text: str) -> None:
    with folder.journal.open("a") as file:
        file.write(text)


def long_run(root: Path) -> RunFolder:
    folder = make_run(root, "long", started())
    append(folder, lines(12_000))
    assert folder.journal.stat().st_size > MAX_FULL_READ_BYTES
    return folder


def test_of_a_long_journal_the_ends_are_read(tmp_path: Path) -> None:
    watch = RunWatcher(long_run(tmp_path))
    history = watch.poll()
    assert history.started is not None
    assert history.steps_done == 120_000
    assert watch.bytes_read < 4 * INITIAL_TAIL_BYTES


def test_then_only_what_came_since(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    watch = RunWatcher(folder)
    watch.poll()
    before = watch.bytes_read
    news = to_line(epoch(1, 0.9)) + "\n" + lines(1, 12_001)
    append(folder, news[:-5])
    assert watch.poll().epochs[-1].val_accuracy == 0.9
    append(folder, news[-5:])
    assert watch.poll().steps_done == 120_010
    assert watch.bytes_read - before == len(news)


def test_a_run_that_has_been_holding_for_long_is_still_paused(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    append(folder, to_line(RunPaused(step=120_000, epoch=1)) + "\n")
    append(folder, (to_line(GpuEvent(gpus=[GpuSample("GPU-1", busy=0)] * 8)) + "\n") * 3000)
    assert RunWatcher(folder).poll().paused
    append(folder, to_line(RunContinued(step=120_000, epoch=1)) + "\n")
    assert not RunWatcher(folder).poll().paused


def test_a_short_journal_is_read_whole(tmp_path: Path) -> None:
    watch = RunWatcher(
        make_run(tmp_path, "short", started(), epoch(1, 0.9), epoch(2, 0.8), RunFinished(state="finished"))
    )
    history = watch.poll()
    assert history.best is not None
    assert (len(history.epochs), history.best.epoch) == (2, 1)


def test_a_torn_line_at_the_end_is_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    line = to_line(RunFinished(state="finished")) + "\n"
    append(folder, line[:7])
    watch = RunWatcher(folder)
    assert watch.poll().finished is None
    append(folder, line[7:])
    assert watch.poll().finished is not None


def test_a_journal_that_is_gone_or_shorter_begins_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", started(), epoch(1, 0.9))
    watch = RunWatcher(folder)
    assert watch.poll().epochs
    folder.journal.write_text(to_line(started()) + "\n")
    assert not watch.poll().epochs
    folder.journal.unlink()
    assert watch.poll().started is None

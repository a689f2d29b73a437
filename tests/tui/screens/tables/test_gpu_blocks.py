"""The GPUs of the monitor as text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.base.codec import decode
from engine.gpus.snapshot import Gpu, Measurement, Snapshot
from support.gputrain_command import ROOT
from support.replace import replace
from support.screen.demo_app import FROZEN_NOW, FrozenGpuFeed, demo_snapshot, past_loads
from tui.charts.history import GpuLoads
from tui.screens.phrases import gpu_warnings, is_free, users
from tui.screens.tables.gpu_blocks import GpuBlocks, GpuView

RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"


def recorded() -> Snapshot:
    return decode(RECORDING.read_text().splitlines()[0], Snapshot)


@cache
def recorded_loads() -> GpuLoads:
    return past_loads(recorded())


def with_readings(gpu: Gpu, **values: Any) -> Gpu:
    return replace(gpu, **{key: Measurement(value, FROZEN_NOW) for key, value in values.items()})


def table(snapshot: Snapshot, width: int, lines: int) -> list[list[str]]:
    """Return the header, then the lines of each GPU."""
    loads = recorded_loads() if snapshot == recorded() else FrozenGpuFeed(snapshot).loads
    blocks = GpuBlocks(snapshot, loads, GpuView(width, lines, 600.0))
    made = [blocks.lines(gpu, picked=False) for gpu in snapshot.gpus]
    return [[blocks.header.plain], *([line.plain for line in block] for block in made)]


@pytest.mark.parametrize(("width", "lines"), [(58, 1), (78, 2), (118, 3), (158, 5), (198, 8)])
def test_gpu_table_fits_width(width: int, lines: int) -> None:
    for snapshot in (demo_snapshot(FROZEN_NOW), recorded()):
        header, *blocks = table(snapshot, width, lines)
        assert all(len(line) <= width for line in (*header, *(line for block in blocks for line in block)))
        expected = [1 if is_free(gpu) else lines for gpu in snapshot.gpus]
        assert [len(block) for block in blocks] == expected


def test_free_gpu_has_one_line_with_what_must_be_known_of_it() -> None:
    snapshot = demo_snapshot(FROZEN_NOW)
    hot = with_readings(snapshot.gpus[2], throttle=("thermal",))
    (line,) = table(replace(snapshot, gpus=(*snapshot.gpus[:2], hot)), 158, 3)[3]
    assert all(word in line for word in ("free", "slowed: heat", "33°C"))


@pytest.mark.parametrize(("width", "lines"), [(78, 1), (158, 3)])
def test_gpu_table_shows_unknown_readings_as_unknown(width: int, lines: int) -> None:
    snapshot = demo_snapshot(FROZEN_NOW)
    names = ("util", "sm_active", "tensor_active", "memory_used", "power", "temperature", "sm_clock")
    unknown = with_readings(snapshot.gpus[0], **dict.fromkeys(names))
    _, block = table(replace(snapshot, gpus=(unknown,)), width, lines)
    text = "\n".join(block)
    assert "–" in text and ("┄" in text) is (width > 78), "a narrow line has no meters"
    assert "0%" not in text and "■" not in text.splitlines()[0]


def test_gpu_table_gives_reason_of_lost_gpu() -> None:
    snapshot = recorded()
    (lost,) = [gpu for gpu in snapshot.gpus if gpu.state == "lost"]
    assert "lost" in table(snapshot, 78, 1)[1 + lost.index][0]


def test_users_lists_runs_with_ranks_then_other_users() -> None:
    snapshot = demo_snapshot(FROZEN_NOW)
    first, other = snapshot.gpus[0], snapshot.gpus[4]
    assert users(first) == ["fashion-17 rank 0"]
    both = replace(first, processes=Measurement((*first.processes.value, *other.processes.value), FROZEN_NOW))
    assert users(both) == ["fashion-17 rank 0", "bob"]
    assert users(replace(first, processes=Measurement((), FROZEN_NOW))) == ["fashion-17"]


def test_is_free_is_false_if_processes_are_unknown() -> None:
    free = demo_snapshot(FROZEN_NOW).gpus[2]
    assert is_free(free)
    assert not is_free(replace(free, processes=Measurement(None, FROZEN_NOW, "no permission")))


def test_notes_say_throttle_reasons_in_words_once() -> None:
    reasons = ["idle", "thermal", "hardware thermal", "power cap"]
    gpu = with_readings(demo_snapshot(FROZEN_NOW).gpus[0], throttle=reasons)
    assert gpu_warnings(gpu) == ["slowed: heat, power"]
    assert gpu_warnings(with_readings(gpu, throttle=["idle"], ecc_uncorrected=2)) == ["2 ECC errors"]

"""The readings and graphs of one GPU as text."""

from __future__ import annotations

from engine.base.codec import decode
from engine.gpus.nvml import THROTTLE_REASONS
from engine.gpus.snapshot import Gpu, Measurement, Snapshot
from support.gputrain_command import ROOT
from support.replace import replace
from tui.screens.tables.gpu_readings import THROTTLE_MEANINGS, reading_lines, throttle_lines

RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"


def gpu_with(**readings: Measurement[object]) -> Gpu:
    gpu = decode(RECORDING.read_text().splitlines()[0], Snapshot).gpus[0]
    return replace(gpu, **readings)


def test_every_throttle_reason_has_a_meaning() -> None:
    assert set(THROTTLE_REASONS.values()) == set(THROTTLE_MEANINGS)


def test_throttle_lines_explain_each_reason() -> None:
    gpu = gpu_with(throttle=Measurement(("power cap", "unknown (0x8000)"), 0.0))
    assert [line.plain for line in throttle_lines(gpu)] == [
        "slowed by  power cap: the power draw is at its limit, which lowers the clocks",
        "slowed by  unknown (0x8000)",
    ]


def test_reading_lines_say_once_why_group_is_unknown() -> None:
    unknown: Measurement[object] = Measurement(None, 0.0, "not supported by this driver")
    gpu = gpu_with(nvlinks=unknown, nvlink_sent=unknown, nvlink_received=unknown)
    assert "\n".join(line.plain for line in reading_lines(gpu, 78)).count("not supported by") == 1

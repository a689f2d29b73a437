"""What shows no sign of life for too long is reported once."""

from __future__ import annotations

from engine.base.stall import StallWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stall_is_reported_once_until_the_next_sign_of_life() -> None:
    clock = Clock()
    watch = StallWatch(300.0, clock)
    found = []
    for now, sign in [(0, 1), (299, 1), (300, 1), (500, 1), (501, 2), (900, 2), (2003, 2), (2004, 2)]:
        clock.now = now
        found.append(watch.poll(sign))
    # The longest silence was 501 s: three times as much is a stall.
    assert found == [None, None, 300, None, None, None, None, 1503]


def test_stall_detection_can_be_disabled() -> None:
    clock = Clock()
    watch = StallWatch(0.0, clock)
    watch.poll("start")
    clock.now = 1e6
    assert watch.poll("start") is None

"""The number of decode threads follows the steps of the rank."""

from __future__ import annotations

import pytest

from engine.data.pipelines.thread_count import CALM_WINDOWS, WINDOW_BATCHES, ThreadCount


def observe_windows(count: ThreadCount, windows: int, wait: float, step: float, *, queue_full: bool = False) -> None:
    for _ in range(windows * WINDOW_BATCHES):
        count.observe(wait, step, queue_full=queue_full)


@pytest.mark.parametrize(("wait", "threads"), [(0.0, 4), (0.1, 5), (0.25, 6), (0.9, 8)])
def test_thread_count_grows_to_what_had_needed_no_wait(wait: float, threads: int) -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, 1, wait, 1 - wait)
    assert count.value == threads


def test_thread_count_stays_within_maximum() -> None:
    count = ThreadCount(4, 6)
    observe_windows(count, 5, 0.9, 0.1)
    assert count.value == 6


def test_thread_count_ignores_single_waits() -> None:
    count = ThreadCount(4, 16)
    for number in range(10 * WINDOW_BATCHES):
        count.observe(0.1 if number % WINDOW_BATCHES == 0 else 0, 1, queue_full=False)
    assert count.value == 4


def test_thread_count_shrinks_only_while_queue_stays_full() -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, CALM_WINDOWS - 1, 0, 1, queue_full=True)
    assert count.value == 4
    observe_windows(count, 1, 0, 1, queue_full=True)
    assert count.value == 3
    observe_windows(count, 10 * CALM_WINDOWS, 0, 1, queue_full=True)
    assert count.value == 1
    observe_windows(calm := ThreadCount(4, 16), 10 * CALM_WINDOWS, 0, 1)
    assert calm.value == 4


def test_thread_count_waits_longer_after_shrinking_too_far() -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, CALM_WINDOWS, 0, 1, queue_full=True)
    observe_windows(count, 1, 0.1, 0.9)
    assert count.value == 4
    observe_windows(count, 2 * CALM_WINDOWS - 1, 0, 1, queue_full=True)
    assert count.value == 4
    observe_windows(count, 1, 0, 1, queue_full=True)
    assert count.value == 3


def test_thread_count_is_divided_among_processes() -> None:
    assert [ThreadCount(11, 16).share_of(process, 3) for process in range(3)] == [4, 4, 3]
    assert [ThreadCount(1, 16).share_of(process, 2) for process in range(2)] == [1, 1]

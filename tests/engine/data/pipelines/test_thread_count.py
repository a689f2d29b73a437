"""The number of decode threads follows the steps of the rank."""

from __future__ import annotations

import pytest

from engine.data.pipelines.thread_count import CALM_WINDOWS, WINDOW_BATCHES, ThreadCount


def observe_windows(count: ThreadCount, windows: int, wait: float, busy_threads: float = 99) -> None:
    """Observe windows of steps of 1 s. The rank waits `wait` seconds in each; `busy_threads` threads never pause."""
    for _ in range(windows * WINDOW_BATCHES):
        count.observe(wait, 1 - wait, busy_threads)


@pytest.mark.parametrize(("wait", "threads"), [(0.0, 4), (0.1, 5), (0.25, 6), (0.9, 8)])
def test_thread_count_grows_to_what_had_needed_no_wait(wait: float, threads: int) -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, 1, wait)
    assert count.value == threads


def test_thread_count_stays_within_maximum() -> None:
    count = ThreadCount(4, 6)
    observe_windows(count, 5, 0.9)
    assert count.value == 6


def test_thread_count_ignores_single_waits() -> None:
    count = ThreadCount(4, 16)
    for number in range(10 * WINDOW_BATCHES):
        count.observe(0.1 if number % WINDOW_BATCHES == 0 else 0, 1, 4)
    assert count.value == 4


def test_thread_count_shrinks_while_one_thread_less_suffices() -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, CALM_WINDOWS - 1, 0, 1.5)
    assert count.value == 4
    observe_windows(count, 1, 0, 1.5)
    assert count.value == 3
    observe_windows(count, 10 * CALM_WINDOWS, 0, 1.5)
    assert count.value == 2, "1.5 of 2 threads work"
    observe_windows(count, 10 * CALM_WINDOWS, 0, 0.1)
    assert count.value == 1


def test_thread_count_stays_between_wait_and_idle_threads() -> None:
    observe_windows(count := ThreadCount(4, 16), 10 * CALM_WINDOWS, 0, 3.6)
    assert count.value == 4


def test_thread_count_that_is_set_stays() -> None:
    observe_windows(count := ThreadCount(4), 10 * CALM_WINDOWS, 0.5)
    observe_windows(count, 10 * CALM_WINDOWS, 0, 0.1)
    assert count.value == 4


def test_thread_count_waits_longer_after_shrinking_too_far() -> None:
    count = ThreadCount(4, 16)
    observe_windows(count, CALM_WINDOWS, 0, 1)
    observe_windows(count, 1, 0.1)
    assert count.value == 4
    observe_windows(count, 2 * CALM_WINDOWS - 1, 0, 1)
    assert count.value == 4
    observe_windows(count, 1, 0, 1)
    assert count.value == 3


def test_thread_count_is_divided_among_processes() -> None:
    assert [ThreadCount(11).share_of(process, 3) for process in range(3)] == [4, 4, 3]
    assert [ThreadCount(1).share_of(process, 2) for process in range(2)] == [1, 1]

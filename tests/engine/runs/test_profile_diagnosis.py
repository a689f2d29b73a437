"""The sentence about a profile: which rank or which part of the steps takes the time."""

from __future__ import annotations

from engine.runs.profile_diagnosis import diagnose_profile
from engine.runs.profile_file import RankProfile
from support.runs.profiles import (
    BALANCED,
    FAST_RANK,
    SLOW_RANK,
    STARVED,
    make_input_times,
    make_profile,
    make_rank_profile,
)


def diagnosis(*ranks: RankProfile, device_type: str = "cpu") -> tuple[str, int | None]:
    found = diagnose_profile(make_profile(*ranks, device_type=device_type))
    return found.message, found.straggler


def test_slow_rank_is_named_with_the_part_that_is_slow() -> None:
    ranks = [make_rank_profile(rank, SLOW_RANK if rank == 2 else FAST_RANK) for rank in range(4)]
    assert diagnosis(*ranks) == ("waiting for rank 2: its forward pass takes 3.5x the median", 2)


def test_rank_that_waits_for_data_is_named_with_its_slowest_stage() -> None:
    starved = make_rank_profile(1, STARVED, input=make_input_times(read=0.2, decode=0.7, crop=0.1))
    fast = make_rank_profile(0, (1.0, 0.0, 10.0, 20.0, 66.0, 2.0, 1.0))
    assert diagnosis(fast, starved) == (
        "waiting for rank 1: it waits for data 60% of the time; decode takes 70% of the time of the input",
        1,
    )


def test_input_that_is_slow_on_all_ranks_is_no_straggler() -> None:
    ranks = [make_rank_profile(rank, STARVED) for rank in range(2)]
    assert diagnosis(*ranks) == ("waiting for data 60% of the time", None)


def test_allreduce_of_equal_ranks_is_named() -> None:
    ranks = [make_rank_profile(rank, (1.0, 0.0, 20.0, 40.0, 36.0, 2.0, 1.0)) for rank in range(2)]
    message, straggler = diagnosis(*ranks)
    assert (message.partition(";")[0], straggler) == ("waiting for the all-reduce 36% of the time", None)


def test_idle_gpu_means_steps_that_are_too_small() -> None:
    idle = (1.0, 0.0, 20.0, 30.0, 0.0, 2.0, 47.0)
    message, _ = diagnosis(make_rank_profile(0, idle, source="kernels"), device_type="cuda")
    assert message.startswith("too little work per step: the GPU is idle 47% of the time; ")


def test_computation_is_named_by_its_largest_part() -> None:
    assert diagnosis(make_rank_profile(0, BALANCED)) == ("CPU-bound: backward takes 60% of the step", None)
    assert diagnosis(make_rank_profile(0, BALANCED), device_type="cuda")[0].startswith("GPU-bound: ")

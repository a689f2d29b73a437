"""Profiles of runs on GPUs: without CUPTI, CUDA events measure the parts of the steps."""

from __future__ import annotations

import json
import statistics

import pytest

from support.gpu.fake_cuda import Rehearsal


@pytest.mark.rehearsal
@pytest.mark.parametrize("options", [(), ("data.pipeline=stream",)], ids=["memory", "stream"])
def test_profile_without_kernels_in_the_trace_measures_with_cuda_events(
    rehearsal: Rehearsal, options: tuple[str, ...]
) -> None:
    run = rehearsal.start(
        *("run", "--headless", "digits", "--epochs", "200", "--gpus", "free:2", "--name", "a", "run.log_every=1"),
        *options,
    )
    rehearsal.wait_for_event("a", "step")
    done = rehearsal("runs", "profile", "a", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert rehearsal("stop", "a").returncode == 0
    assert run.wait(60) == 3
    assert profile["device_type"] == "cuda"
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    for rank in profile["ranks"]:
        # Fewer than four only if the epoch ends before.
        assert len(rank["steps"]) == 4 or profile["note"]
        assert sum(part["mean"] for part in rank["parts"].values()) == pytest.approx(statistics.mean(rank["steps"]))
        assert rank["trace"] == f"rank-{rank['rank']}.json.gz"

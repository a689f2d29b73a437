"""`gputrain runs profile` of live runs: the parts of the steps, the rank that is slow, and the traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.gputrain_command import Gputrain

RUN = ("digits", "--epochs", "100000", "run.log_every=1")
STEPS = 6


def take_profile(gputrain: Gputrain, name: str) -> dict[str, Any]:
    """Profile a live run of this name, stop it, and return what `gputrain runs profile --json` prints."""
    gputrain.wait_for_event(name, "step")
    done = gputrain("runs", "profile", name, "--steps", str(STEPS), "--json")
    assert done.returncode == 0, done.stderr
    assert gputrain("stop", name).returncode == 0
    profile: dict[str, Any] = json.loads(done.stdout)
    return profile


def check_traces(profile: dict[str, Any]) -> None:
    """Each rank has a trace with all steps and their phases."""
    for rank in profile["ranks"]:
        path = Path(profile["folder"]) / rank["trace"]
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        # The end of an epoch cuts a profile short.
        first, steps = profile["step"], len(rank["steps"])
        assert steps == STEPS or profile["note"]
        assert [f"gputrain: step {step}" for step in range(first, first + steps)] == [
            name for name in names if name.startswith("gputrain: step ")
        ][1:], "the first step warms up"
        for phase in ("data", "forward", "backward", "optimizer"):
            assert names.count(f"gputrain: {phase}") == steps + 1
        assert sum(event["name"] == "aten::addmm" for event in events) >= steps


@pytest.mark.nightly
def test_profile_of_a_live_run_names_the_slow_rank(gputrain: Gputrain) -> None:
    gputrain.inject_fault("slow", 1, *range(1, 2000))
    run = gputrain.start("run", "--headless", *RUN, "--model", "linear", "--ranks", "2", "--name", "a")
    profile = take_profile(gputrain, "a")
    assert run.wait(60) == 3
    fast, slow = (rank["parts"] for rank in profile["ranks"])
    # The fault sleeps for 50 ms in the forward pass.
    assert slow["forward"]["mean"] > 0.05
    # The other rank waits for it in the all-reduce of its backward pass.
    assert fast["backward"]["mean"] > slow["backward"]["mean"]
    check_traces(profile)

"""`gputrain runs profile` of live runs: the parts of the steps, the rank that is slow, and the traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.gputrain_command import Gputrain, read_events

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


def journal_seconds(run: Path, profile: dict[str, Any]) -> float:
    """Return the duration of the profiled steps by the clock of the `step` events."""
    global_batch = profile["batch_size"] * len(profile["ranks"])
    steps = range(profile["step"], profile["step"] + STEPS)
    found = [event for event in read_events(run) if event["type"] == "step" and event["step"] in steps]
    assert len(found) == STEPS
    return sum(global_batch / event["images_per_second"] for event in found)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["linear", "cnn"])
def test_parts_add_up_to_the_steps_of_the_journal(gputrain: Gputrain, model: str) -> None:
    gputrain.inject_fault("slow", 1, *range(1, 2000))
    gputrain.start("run", "--headless", *RUN, "--model", model, "--ranks", "2", "--name", "a")
    profile = take_profile(gputrain, "a")
    expected = journal_seconds(gputrain.runs / "a", profile)
    for rank in profile["ranks"]:
        parts = sum(part["mean"] for part in rank["parts"].values()) * STEPS
        assert parts == pytest.approx(expected, rel=0.05)
        print(f"{model}: rank {rank['rank']} {parts:.4f} s, journal {expected:.4f} s, {parts / expected - 1:+.2%}")


@pytest.mark.soak
def test_profile_does_not_trip_the_watchdog_or_change_the_result(gputrain: Gputrain) -> None:
    options = ("digits", "--model", "linear", "--ranks", "2", "--epochs", "60", "run.watchdog=3")
    gputrain.start("run", "--headless", *options, "--name", "a")
    gputrain.wait_for_event("a", "step")
    assert gputrain("runs", "profile", "a", "--steps", "8").returncode == 0
    assert gputrain("run", "--headless", *options, "--name", "b").returncode == 0
    gputrain.wait_for_event("a", "run_finished")
    losses = [
        [event["losses"] for event in read_events(gputrain.runs / name) if event["type"] == "step"] for name in "ab"
    ]
    assert losses[0] == losses[1]
    assert read_events(gputrain.runs / "a")[-1]["state"] == "finished"

"""What is asked of a run through its folder: done by all ranks at one step, recorded, and without a trace in what is
trained."""

from __future__ import annotations

from conftest import Gputrain, clockless, events_of, wait_for

from engine.runs.control import RequestCounters, send_request
from engine.runs.folder import RunFolder, RunState

RUN = ["run", "--headless", "digits", "--model", "linear", "--ranks", "2", "run.log_every=7"]


def test_a_run_holds_saves_and_goes_on_as_if_nothing_had_been(gputrain: Gputrain) -> None:
    plain = gputrain.start(*RUN, "--name", "plain", "--epochs", "20")
    gputrain.start(*RUN, "--name", "asked", "--epochs", "20")
    asked = RunFolder(gputrain.runs / "asked")
    gputrain.wait_for_event("asked", "epoch", 1)
    send_request(asked.control, "pause")
    gputrain.wait_for_event("asked", "paused")
    assert asked.state(asked.history()) is RunState.PAUSED

    send_request(asked.control, "checkpoint")
    wait_for(lambda: events_of(asked.path)[-1]["type"] == "checkpoint", "a checkpoint of a run that holds")
    held, saved = (
        next(one for one in events_of(asked.path)[::-1] if one["type"] == kind) for kind in ("paused", "checkpoint")
    )
    assert saved["step"] == held["step"] < 20 * 11

    send_request(asked.control, "continue")
    gputrain.wait_for_event("asked", "run_finished")
    assert plain.wait(60) == 0
    events = events_of(asked.path)
    assert next(one for one in events if one["type"] == "continued")["step"] == held["step"]
    assert [one["outcome"] for one in events if one["type"] == "control"] == ["at the next step"] * 2 + ["at once"]
    assert clockless(events) == clockless(events_of(gputrain.runs / "plain"))


def test_what_is_asked_twice_is_said_to_be() -> None:
    asked = RequestCounters()
    assert [asked.apply(name) for name in ("continue", "pause", "pause", "continue", "stop", "stop", "dance")] == [
        "is not paused",
        "at the next step",
        "is paused already",
        "at once",
        "at the next step, with a checkpoint",
        "was asked for already",
        "not known here, left undone",
    ]

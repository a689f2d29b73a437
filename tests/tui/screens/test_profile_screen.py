"""The screen of a profile: stored profiles, a request for another one, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.events import Profiled
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.messages import says
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import append_events, make_run_folder
from support.runs.profiles import (
    PROFILE,
    store_profile,
)
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, open_profile, press, real_app
from tui.screens.pollers.files import ProfileReader, watch_profile


@pytest.fixture
def run(isolated_folder: None, tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path / "runs", "a", make_run_started(), make_step(10))


@pytest.fixture
def live_run(run: RunFolder) -> Iterator[RunFolder]:
    ownership = Ownership(run)
    yield run
    ownership.release()


def status(pilot: Pilot[None]) -> str:
    return visible_text(pilot, "#profile-status")


def test_profile_screen_says_why_no_profile_was_taken(live_run: RunFolder) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await open_profile(pilot)
        append_events(live_run, Profiled(step=10, epoch=1, steps=0, message="the run was paused\x1b[2J"))
        await wait_until(pilot, lambda: screen.reader.answer is not None)
        screen.update_content()
        await wait_until_idle(pilot)
        assert says(status(pilot), "not-recorded", ": the run was paused\\x1b[2J")

    drive(real_app(live_run.path.parent, "a"), act)


def test_profile_screen_shows_the_path_of_the_trace_whole(run: RunFolder) -> None:
    store_profile(run, PROFILE)

    async def act(pilot: Pilot[None]) -> None:
        await open_profile(pilot)
        lines = visible_text(pilot, "#profile").splitlines()
        assert str(run.profiles) in "".join(line.strip("│ ") for line in lines)

    drive(real_app(run.path.parent, "a"), act, size=(60, 30))


def test_another_profile_of_a_live_run_is_taken_after_a_question(live_run: RunFolder) -> None:
    store_profile(live_run, PROFILE)

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_profile(pilot)
        assert screen.reader.asked_at is None
        await press(pilot, "P", "enter")
        assert screen.reader.asked_at is None
        await press(pilot, "P", "down", "enter")
        assert screen.reader.asked_at is not None

    drive(real_app(live_run.path.parent, "a"), act)


def test_poller_reads_a_profile_again_that_the_run_was_still_writing(run: RunFolder) -> None:
    poller, name = watch_profile(ProfileReader(run)), store_profile(run, PROFILE)
    record = run.profiles / name / "profile.json"
    record.rename(record.with_suffix(".part"))
    poller.poll()
    assert poller.value is None and poller.has_polled
    record.with_suffix(".part").rename(record)
    poller.poll()
    assert poller.value == (name, PROFILE) and poller.problem is None

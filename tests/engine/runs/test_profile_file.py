"""Stored profiles: what is kept, what they name as the largest part, and files that others wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.base.codec import InvalidRecordError
from engine.runs.folder import RunFolder
from engine.runs.profile_file import (
    MAX_PROFILES,
    diagnose_profile,
    list_profiles,
    newest_profile,
    read_profile,
)
from support.messages import raises_problem
from support.runs.factories import make_run_folder
from support.runs.profiles import BALANCED, PROFILE, STARVED, make_profile, make_rank_profile, store_profile


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a")


def test_stored_profile_is_read_as_it_was(run: RunFolder) -> None:
    profile = make_profile(note="the epoch ended", requested=10)
    name = store_profile(run, profile)
    assert read_profile(run, name) == profile
    assert newest_profile(run) == (name, profile)
    assert sorted(path.name for path in (run.profiles / name).iterdir()) == [
        "profile.json",
        "rank-0.json.gz",
        "rank-1.json.gz",
    ]


def test_only_the_newest_profiles_are_kept(run: RunFolder) -> None:
    # After a resume, a newer profile may have an earlier step.
    steps = [500, *range(100, 100 + MAX_PROFILES)]
    for age, step in enumerate(steps):
        name = store_profile(run, make_profile(step=step))
        os.utime(run.profiles / name, (age, age))
    assert list_profiles(run) == [f"step-{step:08d}" for step in reversed(steps[1:])]


def test_profile_of_the_same_step_is_replaced(run: RunFolder) -> None:
    store_profile(run, make_profile(batch_size=1))
    name = store_profile(run, make_profile(make_rank_profile(0), batch_size=2))
    assert list_profiles(run) == [name]
    assert read_profile(run, name).batch_size == 2
    assert not (run.profiles / name / "rank-1.json.gz").exists()


def test_folder_without_a_record_is_no_profile(run: RunFolder) -> None:
    name = store_profile(run, make_profile(step=1))
    os.utime(run.profiles / name, (1, 1))
    (run.profiles / "step-00000002").mkdir()
    found = newest_profile(run)
    assert found is not None
    assert found[0] == name


@pytest.mark.parametrize(("change", "code"), [({"steps": 0}, "damaged"), ({"format": 2}, "wrong-version")])
def test_record_with_an_invalid_value_is_refused(run: RunFolder, change: dict[str, object], code: str) -> None:
    name = store_profile(run, make_profile())
    path = run.profiles / name / "profile.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with raises_problem(code, kind=InvalidRecordError):
        read_profile(run, name)
    assert newest_profile(run) is None


@pytest.mark.parametrize("link", ["profile", "step", "record"])
def test_links_in_the_folder_of_profiles_are_not_followed(run: RunFolder, tmp_path: Path, link: str) -> None:
    other = make_run_folder(tmp_path, "other")
    name = store_profile(other, make_profile())
    paths = {"profile": Path("profile"), "step": Path("profile") / name}
    paths["record"] = paths["step"] / "profile.json"
    target, path = other.path / paths[link], run.path / paths[link]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    with raises_problem("not-readable", kind=InvalidRecordError):
        read_profile(run, name)
    assert run.link_problem() is not None


@pytest.mark.parametrize(
    ("parts", "device_type", "message"),
    [
        (STARVED, "cpu", "waiting for data 60% of the time"),
        (BALANCED, "cpu", "CPU-bound: backward takes 64% of the step"),
        (BALANCED, "cuda", "GPU-bound: backward takes 64% of the step"),
    ],
)
def test_largest_part_is_named(parts: tuple[float, ...], device_type: str, message: str) -> None:
    assert diagnose_profile(make_profile(make_rank_profile(0, parts), device_type=device_type)) == message


def test_rank_that_the_others_wait_for_is_named_in_place_of_their_wait() -> None:
    assert diagnose_profile(PROFILE) == "rank 1 is 49 ms slower in forward; rank 0 waits for it in backward"

"""Profiles of a run: `RUN/profile/step-NNNNNNNN/profile.json` beside the trace of each rank, `rank-N.json.gz`.

`engine.train.loop.profile` writes them on rank 0, `gputrain runs profile` and the screen read them. Another user may
have written the file, so its size and all values are bounded, and no link is followed.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from engine.base.codec import (
    ENTRIES,
    Count,
    FileRecord,
    InvalidRecordError,
    Meta,
    Record,
    Seconds,
    UnixTime,
    read_record,
    write_record,
)
from engine.base.files import opened_folder
from engine.runs.bottleneck import MAX_DATA_WAIT_SHARE
from engine.runs.folder import RunFolder

RECORD_NAME = "profile.json"
# Profiles that a run keeps; the oldest is deleted.
MAX_PROFILES = 10
MAX_RECORD_BYTES = 1 << 23
# How much slower a rank must be to be named, as a share of a step. Smaller differences are noise.
MIN_RANK_GAP_SHARE = 0.2
MAX_RANKS = 4096
# gzip makes a tenth of a trace, so a trace takes up to 300 MB of memory in the viewer.
MAX_TRACE_BYTES = 32 << 20
_FOLDER_NAME = re.compile(r"step-\d{8,12}")

Part = Literal["data", "forward", "backward", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "other")

Name = Annotated[str, Meta(max_length=1000)]


class PartTime(Record, frozen=True, kw_only=True):
    """Seconds per step of one part of a rank's steps."""

    mean: Seconds
    median: Seconds


class RankProfile(Record, frozen=True, kw_only=True):
    """Where the time of one rank went.

    `steps` are the durations of the profiled steps. The means of `parts` add up to the mean step. The all-reduce is in
    the backward pass.
    """

    rank: Count
    host: Name = ""
    device: Name = ""
    steps: Annotated[list[Seconds], Meta(min_length=1, max_length=100)]
    parts: Annotated[dict[str, PartTime], ENTRIES]
    trace: Name = ""
    """File name of the trace; "" if there is none."""
    problem: Name = ""
    """Why there is no trace; "" if there is one."""

    @property
    def step_seconds(self) -> float:
        """Mean duration of the steps."""
        return sum(self.steps) / len(self.steps)

    def mean(self, part: Part) -> float:
        """Return the mean seconds of a part per step; 0 if it is unknown."""
        return self.parts[part].mean if part in self.parts else 0.0


class Profile(FileRecord, frozen=True, kw_only=True):
    """Profile of `steps` optimizer steps from `step` on, of all ranks.

    `requested` is the number of steps that was asked for, `note` says why there are fewer.
    """

    time: UnixTime
    step: Count
    epoch: Count
    steps: Annotated[int, Meta(ge=1, le=100)]
    requested: Count
    note: Name = ""
    device_type: Literal["cpu", "cuda"]
    batch_size: Count
    ranks: Annotated[list[RankProfile], Meta(min_length=1, max_length=MAX_RANKS)]


def trace_name(rank: int) -> str:
    """Return the name of the file with the trace of a rank."""
    return f"rank-{rank}.json.gz"


def store_profile(run: RunFolder, profile: Profile, traces: Mapping[int, bytes]) -> str:
    """Write a profile and the traces of its ranks. Return the name of its folder. Raises OSError.

    The oldest profiles are deleted. One of the same step, which a resumed run repeats, is replaced.
    """
    name = f"step-{profile.step:08d}"
    run.profiles.mkdir(0o755, exist_ok=True)
    with opened_folder(run.profiles) as profiles:
        names = _names_by_age(profiles)
        older = [each for each in names if each != name]
        for each in {*older[: max(len(older) - MAX_PROFILES + 1, 0)], *({name} & set(names))}:
            # rmtree follows no link.
            shutil.rmtree(profiles / each)
        (profiles / name).mkdir(0o755)
        for rank, trace in traces.items():
            (profiles / name / trace_name(rank)).write_bytes(trace)
        write_record(profiles / name / RECORD_NAME, profile)
    return name


def _names_by_age(profiles: Path) -> list[str]:
    """Return the names of the profiles in an open folder, the oldest first. Raises OSError."""
    paths = [path for path in profiles.iterdir() if _FOLDER_NAME.fullmatch(path.name)]
    return [path.name for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns)]


def list_profiles(run: RunFolder) -> list[str]:
    """Return the names of the profiles of a run, the newest first; none if they cannot be listed."""
    try:
        with opened_folder(run.profiles) as profiles:
            return _names_by_age(profiles)[::-1]
    except OSError:
        return []


def read_profile(run: RunFolder, name: str) -> Profile:
    """Return a profile by the name of its folder. Raises InvalidRecordError."""
    try:
        with opened_folder(run.profiles) as profiles, opened_folder(profiles / name) as folder:
            return read_record(folder / RECORD_NAME, Profile, MAX_RECORD_BYTES)
    except OSError as error:
        raise InvalidRecordError(f"cannot be read: {error.strerror or error}", code="not-readable") from error


def newest_profile(run: RunFolder) -> tuple[str, Profile] | None:
    """Return the newest profile of a run that can be read, and its name; None if there is none."""
    for name in list_profiles(run):
        with suppress(InvalidRecordError):
            return name, read_profile(run, name)
    return None


def diagnose_profile(profile: Profile) -> str:
    """Return what takes the time of the profiled steps, as one sentence."""
    shares = {
        part: statistics.fmean(rank.mean(part) / max(rank.step_seconds, 1e-9) for rank in profile.ranks)
        for part in PARTS
    }
    if shares["data"] > MAX_DATA_WAIT_SHARE:
        return f"waiting for data {shares['data']:.0%} of the time"
    largest = max(PARTS, key=lambda part: shares[part])
    slow, fast = (choose(profile.ranks, key=lambda rank: rank.mean("forward")) for choose in (max, min))
    # The all-reduce in backward waits for the slowest rank.
    seconds = min(slow.mean("forward") - fast.mean("forward"), fast.mean("backward") - slow.mean("backward"))
    if seconds > MIN_RANK_GAP_SHARE * slow.step_seconds:
        late = f"rank {slow.rank} is {seconds * 1e3:.0f} ms slower in forward"
        return f"{late}; rank {fast.rank} waits for it in backward"
    device = "GPU" if profile.device_type == "cuda" else "CPU"
    return f"{device}-bound: {largest} takes {shares[largest]:.0%} of the step"

"""Several users on one host: no user can write to the files of another user's run, send it requests, or make a run
leave its runs folder."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.gpus.reservation import Reservation, user_lock
from engine.jobs.launch.handshake import continue_run_of_agents
from engine.jobs.launch.request import RunRequest
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, list_runs
from engine.runs.ownership import Ownership, claim_run
from support.gputrain_command import Gputrain, read_events
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import create_invalid_requests, make_run_folder

RUN = ["run", "--headless", "digits", "--model", "linear", "--ranks", "1", "--name", "a"]


def world_writable_paths(root: Path) -> list[Path]:
    """Return the world-writable paths below `root`, without links and sticky folders like /tmp."""
    paths = []
    for path in [root, *root.rglob("*")]:
        mode = path.lstat().st_mode
        if mode & stat.S_IWOTH and not stat.S_ISLNK(mode) and not mode & stat.S_ISVTX:
            paths.append(path)
    return paths


@pytest.mark.nightly
def test_run_folder_is_not_writable_by_others_and_run_refuses_invalid_requests(gputrain: Gputrain) -> None:
    names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
    environment = gputrain.environment | {name: str(gputrain.folder / name) for name in names}
    run = gputrain.start(*RUN, "--epochs", "100000", umask=0, env=environment)
    gputrain.wait_for_event("a", "epoch")
    folder = RunFolder(gputrain.runs / "a")
    create_invalid_requests(folder.control)
    gputrain.wait_for_event("a", "control", 11)
    assert not folder.history().stopping
    assert gputrain("stop", "a").stderr == "a is stopped.\n"
    assert run.wait(30) == 3
    outcomes = [event["outcome"] for event in read_events(folder.path) if event["type"] == "control"]
    assert [outcome.split(":")[0] for outcome in outcomes[:-1]] == ["refused"] * 11
    assert outcomes[-1] == "at the next step, with a checkpoint"
    created = {path.name for path in folder.path.iterdir()}
    assert {"checkpoints", "control", "events.jsonl", "lock", "log.txt", "owner.json", "tensorboard"} <= created
    assert world_writable_paths(gputrain.folder) == []


def test_runs_listing_ignores_symlinks(tmp_path: Path) -> None:
    root, other_root = tmp_path / "runs", tmp_path / "elsewhere"
    real = make_run_folder(other_root, "real", make_run_started())
    before = sorted(other_root.rglob("*"))
    root.mkdir()
    (root / "link").symlink_to(real.path)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    assert list_runs(root) == []
    for name in ("link", "dangling"):
        for resume in (True, False):
            with raises_problem("name-in-use", "run.name", name, root):
                claim_run(root, name, "x", resume=resume)
        with raises_problem("unknown-run", name, root):
            find_run(root, name)
    assert sorted(other_root.rglob("*")) == before
    assert not (tmp_path / "nothing").exists()
    # A path to a link selects its target, in the target's own runs folder.
    assert find_run(root, str(root / "link")).path == real.path


def test_ownership_follows_no_symlinked_lock(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lock").symlink_to(tmp_path / "made")
    ownership = Ownership(RunFolder(tmp_path / "a"))
    assert not (tmp_path / "made").exists() and not (tmp_path / "a" / "lock").is_symlink()
    ownership.release()


def test_runs_listing_ignores_odd_entries(gputrain: Gputrain) -> None:
    root = gputrain.runs
    make_run_folder(root, "good", make_run_started(time.time()))
    make_run_folder(root, "odd\nname \x1b[2J", make_run_started())
    (root / os.fsdecode(b"bytes\xff")).mkdir()
    (root / os.fsdecode(b"bytes\xff") / "lock").touch()
    (root / "file").write_text("")
    os.mkfifo(root / "fifo")
    (root / ".hidden").mkdir()
    (root / "no lock").mkdir()
    (root / "fifo inside").mkdir()
    os.mkfifo(root / "fifo inside" / "lock")
    (root / "loop").symlink_to(root / "loop")
    (root / "closed").mkdir(mode=0)
    assert find_run(root, "last").name == "good"
    assert len(list_runs(root)) == 3
    request = RunRequest(Config(), root, "x", agents=("gone",))
    assert continue_run_of_agents(request) is request
    listed = gputrain("runs")
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 4)
    assert "\x1b" not in listed.stdout
    assert len(json.loads(gputrain("runs", "--json").stdout)["runs"]) == 3
    unknown = gputrain("logs", "nothing of the kind")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (2, 1)
    assert "\x1b" not in unknown.stderr
    claim_run(root, None, "odd", resume=False).ownership.release()
    assert (root / "odd-1").is_dir()


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_reservation_is_readable_by_all_and_writable_by_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_umask: None
) -> None:
    base = tmp_path / "shared"
    base.mkdir(mode=0o1777)
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(base))
    entry = Reservation()
    with user_lock():
        entry.enqueue("free:1", ["GPU-1"], "mine")
        assert world_writable_paths(base) == []
    assert all(path.stat().st_mode & stat.S_IROTH for path in base.rglob("*"))
    entry.release()
    assert list(base.iterdir()) == []

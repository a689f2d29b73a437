"""Run folders that other users own or can change, and folders that are moved or deleted while their run trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.launch.handshake import find_run_of_agents
from engine.runs import ownership as ownership_module
from engine.runs.claim import Claim
from engine.runs.events import RunFinished
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, RunState
from engine.runs.ownership import RunFolderGoneError, check_claim, claim_run
from engine.runs.recorder import Recorder
from engine.runs.run_record import read_run_record
from engine.show.table import plain_lines
from engine.training.checkpoint import save_checkpoint
from engine.utils.codec import write_record
from support.json_files import write_json
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import default_fields, make_run_folder, row_of
from tui.tables import styled
from tui.tables.runs import fit_run_list, listed_columns, run_list_line


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Restore the umask, which a claim restricts."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def make_foreign(folder: RunFolder) -> RunFolder:
    folder.path.chmod(0o777)
    return folder


def test_find_run_skips_foreign_run_for_last_and_prefix(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "run-1", make_run_started(1.0))
    make_foreign(make_run_folder(tmp_path, "run-2", make_run_started(2.0)))
    found = [find_run(tmp_path, reference, reads=True).name for reference in ("last", "run", "run-1")]
    assert found == ["run-1"] * 3
    assert find_run(tmp_path, "last", trust_owner=True).name == "run-2"


@pytest.mark.parametrize("reference", ["a", "{folder}", "last"])
def test_find_run_requires_trust_owner_for_foreign_run(tmp_path: Path, reference: str) -> None:
    folder = make_foreign(make_run_folder(tmp_path, "a"))
    reference = reference.format(folder=folder.path)
    with raises_problem("foreign-writable", reference if reference == "last" else str(folder.path), "--trust-owner"):
        find_run(tmp_path, reference)
    assert find_run(tmp_path, reference, trust_owner=True).path == folder.path


def test_foreign_reason_names_planted_entry(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    folder.checkpoints.mkdir()
    assert folder.foreign_reason() is None
    (folder.checkpoints / "last.pt").touch()
    (folder.checkpoints / "last.pt").chmod(0o666)
    assert folder.foreign_reason() == "contains checkpoints/last.pt, which is writable by all users"


@pytest.mark.parametrize("name", ["log.txt", "skipped_files.txt", "checkpoints", "tensorboard", "export"])
def test_links_in_run_are_refused_even_if_its_owner_is_trusted(tmp_path: Path, name: str) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    (tmp_path / "victim").mkdir()
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(tmp_path / "victim")
    make_foreign(folder)
    for use in (find_run, partial(claim_run, stem="x", resume=True)):
        with raises_problem("is-link", str(folder.path), name):
            use(tmp_path, "a", trust_owner=True)
    assert list((tmp_path / "victim").iterdir()) == []


def test_save_checkpoint_does_not_write_through_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        save_checkpoint({"step": 1}, tmp_path / "checkpoints", best=True, keep=1)
    assert list((tmp_path / "victim").iterdir()) == []


def test_claim_run_refuses_to_resume_foreign_folder(tmp_path: Path) -> None:
    folder = make_foreign(make_run_folder(tmp_path, "a", make_run_started()))
    before = sorted(folder.path.iterdir())
    for claim in (check_claim, claim_run):
        arguments = (tmp_path, "a") if claim is check_claim else (tmp_path, "a", "x")
        with raises_problem("foreign-writable", str(folder.path), f"`chmod -R go-w {folder.path}`", "--trust-owner"):
            claim(*arguments, resume=True)
    assert sorted(folder.path.iterdir()) == before
    claim_run(tmp_path, "a", "x", resume=True, trust_owner=True).ownership.release()


@pytest.mark.parametrize(("root_mode", "folder_mode", "file_mode"), [(0o755, 0o755, 0o644), (0o1777, 0o700, 0o600)])
def test_claimed_folder_is_private_in_shared_runs_folder(
    tmp_path: Path, root_mode: int, folder_mode: int, file_mode: int
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(root_mode)
    claimed = claim_run(root, "a", "x", resume=False)
    recorder = Recorder(claimed.folder, Config(), lambda _: None)
    recorder.close()
    claimed.ownership.release()
    assert (root / "a").stat().st_mode & 0o777 == folder_mode
    files = [path for path in (root / "a").rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.stat().st_mode & 0o777 for path in files} == {file_mode}
    assert len(files) >= 5


def test_umask_never_makes_files_writable_by_group(tmp_path: Path) -> None:
    os.umask(0o002)
    claimed = claim_run(tmp_path / "runs", "a", "x", resume=False)
    write_json(claimed.folder.summary, {})
    claimed.ownership.release()
    folder = RunFolder(tmp_path / "runs" / "a")
    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.summary)] == [0o755, 0o644]


@pytest.mark.parametrize("is_moved", [False, True])
def test_owner_of_folder_that_is_gone_raises_and_leaves_its_successor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    monkeypatch.setattr(ownership_module, "HEARTBEAT_INTERVAL_SECONDS", 0.0)
    ownership = claim_run(tmp_path, "a", "x", resume=False).ownership
    if is_moved:
        (tmp_path / "a").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with raises_problem("run-deleted", None, tmp_path / "a", kind=RunFolderGoneError):
        ownership.renew_heartbeat()
    ownership.release()
    assert list((tmp_path / "a").iterdir()) == []


def test_recorder_writes_to_the_folder_that_it_opened_and_not_to_its_successor(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    recorder = Recorder(claimed.folder, Config(), lambda _: None)
    recorder.record(make_run_started())
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    recorder.record(make_epoch(1))
    recorder.record(RunFinished(state="stopped"))
    recorder.close()
    claimed.ownership.release()
    moved = read_run_record(RunFolder(tmp_path / "moved"))
    assert moved is not None and moved.state is RunState.STOPPED
    assert list((tmp_path / "a").iterdir()) == []


def test_recorder_refuses_folder_that_took_the_place(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        Recorder(claimed.folder, Config(), lambda _: None)
    claimed.ownership.release()
    assert list((tmp_path / "a").iterdir()) == []


def test_discard_keeps_folder_that_took_the_place(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    claimed.discard()
    claimed.ownership.release()
    assert (tmp_path / "a").is_dir()


def test_torchrun_restart_ignores_agents_that_foreign_folder_claims(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    write_record(folder.owner, Claim(host="here", agents=("agent-1",)))
    assert find_run_of_agents(tmp_path, ["agent-1"]) == folder
    make_foreign(folder)
    assert find_run_of_agents(tmp_path, ["agent-1"]) is None


def test_lists_say_why_run_is_foreign(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "mine", make_run_started(), make_epoch(1))
    rows = [row_of(RunFolder(tmp_path / "mine"))]
    assert "foreign" not in plain_lines(listed_columns(rows), rows)[0]
    foreign = make_foreign(make_run_folder(tmp_path, "theirs", make_run_started(), make_epoch(1)))
    rows.append(row_of(foreign))
    lines = plain_lines(listed_columns(rows), rows)
    assert ["  is writable by all users  " in line for line in lines] == [False, False, True]
    line = run_list_line(fit_run_list(rows, 200, default_fields()), rows[1])
    assert "is writable by all users" in styled(line).plain

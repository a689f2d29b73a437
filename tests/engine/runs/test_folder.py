"""Run folders: lookup by name, exclusive ownership, and the state of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from engine.base.codec import write_record
from engine.config.run_name import name_from_stem
from engine.config.schema import Config
from engine.jobs.launch.handshake import continue_run_of_agents
from engine.jobs.launch.request import RunRequest
from engine.runs import ownership as ownership_module
from engine.runs.claim import Claim
from engine.runs.control import send_request
from engine.runs.events import RunFinished
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, RunState, list_runs
from engine.runs.ownership import Ownership, RunFolderGoneError, check_claim, claim_run
from engine.runs.recorder import Recorder
from engine.runs.run_record import read_run_record
from engine.train.loop.checkpoint import save_checkpoint
from support.json_files import write_json
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a", make_run_started())


def test_claim_for_resume_removes_stale_requests_and_temporary_checkpoints(folder: RunFolder, tmp_path: Path) -> None:
    send_request(folder.control, "stop")
    folder.checkpoints.mkdir()
    (folder.checkpoints / ".last.pt.123.tmp").write_text("half")
    claim_run(tmp_path, "a", "x", resume=True).ownership.release()
    assert list(folder.control.iterdir()) == []
    assert list(folder.checkpoints.iterdir()) == []


def test_claim_of_taken_name_offers_resume_another_name_and_delete(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "a", make_run_started())
    with raises_problem("name-in-use", "run.name", "a", tmp_path, "--resume", "--name", "`gputrain runs delete a`"):
        claim_run(tmp_path, "a", "x", resume=False)


def test_claim_rejects_folder_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with raises_problem("name-in-use", "run.name", "photos", tmp_path):
        claim_run(tmp_path, "photos", "x", resume=True)


def test_claim_rejects_reserved_name_of_new_run(tmp_path: Path) -> None:
    for refuse in (
        lambda: check_claim(tmp_path, "last", resume=True),
        lambda: claim_run(tmp_path, "last", "x", resume=True),
    ):
        with raises_problem("invalid-name", "run.name", "last"):
            refuse()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("my exp", "my-exp"),
        ("_a.b_", "a.b"),
        ("ü", "ü"),
        ("花 朵!", "花-朵"),
        ("🌸", "run"),
        ("花" * 99, "花" * 53),
        ("x" * 300, "x" * 80),
    ],
)
def test_name_from_stem_replaces_invalid_characters(stem: str, name: str) -> None:
    assert name_from_stem(stem) == name


def test_ownership_is_exclusive_between_processes(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a")
    program = f"""
from pathlib import Path
from engine.runs.ownership import Ownership
from engine.runs.folder import RunFolder
owner = Ownership(RunFolder(Path({str(folder.path)!r})))
print("owned", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "owned\n"
    with raises_problem("already-running", "a", f"process {other.pid} "):
        Ownership(folder)
    other.kill()
    other.communicate()
    Ownership(folder).release()


def test_check_claim_waits_for_lock_of_ending_process(folder: RunFolder, tmp_path: Path) -> None:
    ownership = Ownership(folder)
    ending = Timer(0.3, ownership.release)
    ending.start()
    assert check_claim(tmp_path, "a", resume=True) == folder
    ending.join()


def test_claim_names_run_by_stem_and_next_free_number(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        claimed = claim_run(tmp_path / "runs", None, "digits", resume=False)
        names.append(claimed.folder.name)
        claimed.ownership.release()
    assert names == ["digits-1", "digits-2"]


def test_claim_discard_restores_previous_state(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path / "deep" / "runs", "a", "x", resume=False)
    claimed.discard()
    claimed.ownership.release()
    assert list(tmp_path.iterdir()) == []
    make_run_folder(tmp_path / "runs", "old", make_run_started())
    again = claim_run(tmp_path / "runs", "old", "x", resume=True)
    again.discard()
    again.ownership.release()
    assert (tmp_path / "runs" / "old" / "events.jsonl").exists()


def test_find_run_accepts_name_path_and_last(tmp_path: Path) -> None:
    for age, name in enumerate(("mnist-1", "digits-1", "digits-12")):
        make_run_folder(tmp_path, name, make_run_started(1000.0 + age))
    assert find_run(tmp_path, "digits-1").name == "digits-1"
    assert find_run(tmp_path, "last").name == "digits-12"
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "mnist-1")).path == tmp_path / "mnist-1"


def test_beginning_of_a_name_serves_reading_only(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "exp10")
    with raises_problem("unknown-run", "exp1", "exp10", "whole name"):
        find_run(tmp_path, "exp1")
    assert find_run(tmp_path, "exp1", reads=True).name == "exp10"


def test_name_of_a_folder_without_record_means_no_other_run(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "exp10")
    (tmp_path / "exp1").mkdir()
    with raises_problem("unknown-run", "exp1", "no record"):
        find_run(tmp_path, "exp1", reads=True)
    (tmp_path / "exp1/sweep.yaml").touch()
    with raises_problem("unknown-run", "exp1", "`gputrain sweep stop exp1`"):
        find_run(tmp_path, "exp1", reads=True)


def test_run_without_its_lock_is_found_by_its_record(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "a", make_run_started(), RunFinished(state="finished")).lock.unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text('{"accuracy": 0.9}')
    assert [run.name for run in list_runs(tmp_path)] == ["a"]
    assert find_run(tmp_path, "a").name == "a"
    with raises_problem("name-in-use", "run.name", "the run a already exists"):
        claim_run(tmp_path, "a", "x", resume=False)


def test_find_run_accepts_both_forms_of_a_name(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "\u00e9t\u00e9")
    # As a program on macOS writes it.
    make_run_folder(tmp_path, "cafe\u0301")
    assert find_run(tmp_path, "e\u0301te\u0301").name == "\u00e9t\u00e9"
    assert find_run(tmp_path, "e\u0301", reads=True).name == "\u00e9t\u00e9"
    assert find_run(tmp_path, "caf\u00e9").name == "cafe\u0301"


def test_find_run_rejects_ambiguous_prefix_and_unknown_name(tmp_path: Path) -> None:
    for name in ("digits-1", "digits-2"):
        make_run_folder(tmp_path, name)
    with raises_problem("ambiguous-name", "digits", "digits-1, digits-2"):
        find_run(tmp_path, "digits", reads=True)
    with raises_problem("unknown-run", "digts-1", "digits-1?"):
        find_run(tmp_path, "digts-1")


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


@pytest.mark.parametrize("name", ["checkpoints/last.pt", "profile/step-00000010/profile.json"])
def test_foreign_reason_names_planted_entry(folder: RunFolder, name: str) -> None:
    (folder.path / name).parent.mkdir(parents=True)
    (folder.path / name).touch()
    assert folder.foreign_reason() is None
    (folder.path / name).chmod(0o666)
    assert folder.foreign_reason() == f"contains {name}, which is writable by all users"


@pytest.mark.parametrize("name", ["log.txt", "skipped_files.txt", "checkpoints", "tensorboard", "export"])
def test_links_in_run_are_refused_even_if_its_owner_is_trusted(folder: RunFolder, tmp_path: Path, name: str) -> None:
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


def test_recorder_refuses_and_discard_keeps_a_folder_that_took_the_place(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        Recorder(claimed.folder, Config(), lambda _: None)
    claimed.discard()
    claimed.ownership.release()
    assert list((tmp_path / "a").iterdir()) == []


def test_torchrun_restart_ignores_agents_that_foreign_folder_claims(folder: RunFolder, tmp_path: Path) -> None:
    write_record(folder.owner, Claim(host="here", agents=("agent-1",)))
    request = RunRequest(Config(), tmp_path, "x", agents=("agent-1",))
    assert continue_run_of_agents(request).config.run.name == folder.name
    make_foreign(folder)
    assert continue_run_of_agents(request) is request

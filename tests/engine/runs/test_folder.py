"""Run folders: lookup by name, exclusive ownership, and the state of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from engine.config.run_name import name_from_stem
from engine.runs.control import send_request
from engine.runs.events import RunFinished
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, RunState, list_runs
from engine.runs.ownership import Ownership, check_claim, claim_run
from engine.runs.record_completion import open_run
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder


def state_of(folder: RunFolder) -> RunState:
    return open_run(folder).state


def test_run_state_without_owner_follows_journal_or_is_crashed(tmp_path: Path) -> None:
    assert state_of(make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1))) == RunState.CRASHED
    assert (
        state_of(make_run_folder(tmp_path, "b", make_run_started(), RunFinished(state="stopped"))) == RunState.STOPPED
    )
    assert state_of(make_run_folder(tmp_path, "c", make_run_started(), RunFinished(state="failed"))) == RunState.FAILED
    assert state_of(make_run_folder(tmp_path, "d")) == RunState.CRASHED


def test_claim_for_resume_removes_stale_requests_and_temporary_checkpoints(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
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


def test_check_claim_waits_for_lock_of_ending_process(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
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

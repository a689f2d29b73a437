"""Runs that a run waits for: found by name, followed when renamed, and reported when they cannot finish any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.jobs.queue.dependencies import DependencyError, Predecessor, check_cycles, find_dependencies
from engine.jobs.queue.state import Dependency, write_queue_state
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import append_events, append_to_journal, make_queue_state, make_run_folder


@contextmanager
def follow(root: Path, reference: str) -> Iterator[Predecessor]:
    [dependency] = find_dependencies(root, [reference])
    followed = Predecessor(root, dependency)
    yield followed


def make_run(root: Path, state: str | None) -> RunFolder:
    ends = [RunFinished(state=state, message="out of memory")] if state is not None else []
    return make_run_folder(root, "a", make_run_started(), *ends)


def make_dependency(name: str) -> Dependency:
    return Dependency(name=name, any_end=False, device=0, inode=0)


@pytest.mark.parametrize(("state", "shown"), [("failed", ["failed", "(out of memory)"]), (None, ["crashed"])])
def test_dependency_that_did_not_finish_ends_the_wait(tmp_path: Path, state: str | None, shown: list[str]) -> None:
    make_run(tmp_path, state)
    with (
        follow(tmp_path, "a") as followed,
        raises_problem("wrong-state", None, " a,", *shown, "--after a:any", kind=DependencyError),
    ):
        followed.waits_because()
    with follow(tmp_path, "a:any") as followed:
        assert followed.waits_because() == ""


def test_stopped_dependency_is_waited_for_until_it_is_resumed_and_finishes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "stopped")
    with follow(tmp_path, "a") as followed:
        assert "`gputrain resume a`" in followed.waits_because()
        assert followed.is_stopped
        ownership = Ownership(folder)
        assert followed.waits_because() == "after run a, which is starting"
        assert not followed.is_stopped
        append_events(folder, make_run_started(), RunFinished(state="finished"))
        ownership.release()
        assert followed.waits_because() == ""
    with follow(tmp_path, "a:any") as followed:
        assert followed.waits_because() == ""


def test_dependency_that_was_killed_after_its_end_has_finished(tmp_path: Path) -> None:
    folder = make_run(tmp_path, None)
    append_to_journal(folder, to_line(RunFinished(state="finished")) + "\n")
    with follow(tmp_path, "a") as followed:
        assert followed.waits_because() == ""


def test_dependency_is_waited_for_while_it_lives(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "finished")
    ownership = Ownership(folder)
    with follow(tmp_path, "a") as followed:
        assert followed.waits_because() == "after run a, which is starting"
        ownership.release()
        assert followed.waits_because() == ""


def test_dependency_is_followed_when_it_is_renamed(tmp_path: Path) -> None:
    make_run(tmp_path, None)
    ownership = Ownership(RunFolder(tmp_path / "a"))
    [dependency] = find_dependencies(tmp_path, ["a"])
    with follow(tmp_path, "a") as followed:
        (tmp_path / "a").rename(tmp_path / "b")
        assert followed.waits_because() == "after run b, which is running"
    # A supervisor that starts again finds it by its inode; another run of the old name is not the one.
    make_run(tmp_path, "failed")
    reopened = Predecessor(tmp_path, dependency)
    assert reopened.waits_because() == "after run b, which is running"
    ownership.release()


def test_deleted_dependency_ends_the_wait_unless_any_end_is_accepted(tmp_path: Path) -> None:
    make_run(tmp_path, "finished")
    with follow(tmp_path, "a") as strict, follow(tmp_path, "a:any") as lenient:
        shutil.rmtree(tmp_path / "a")
        with raises_problem("run-deleted", None, " a,", kind=DependencyError):
            strict.waits_because()
        assert lenient.waits_because() == ""


def test_interrupted_dependency_is_waited_for(tmp_path: Path) -> None:
    write_queue_state(make_run_folder(tmp_path, "a"), make_queue_state())
    with follow(tmp_path, "a") as followed:
        assert "`gputrain queue resume a` starts it" in followed.waits_because()


def test_unknown_dependency_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "finished")
    with raises_problem("unknown-run", "queue.after", "nix", tmp_path):
        find_dependencies(tmp_path, ["nix"])


def test_run_that_would_wait_for_itself_is_refused(tmp_path: Path) -> None:
    for name, after in (("a", ()), ("b", (make_dependency("a"),)), ("c", (make_dependency("b"),))):
        write_queue_state(make_run_folder(tmp_path, name), make_queue_state(after=after))
    check_cycles("d", tmp_path, [make_dependency("c")])
    with raises_problem("conflict", "queue.after", ": a "):
        check_cycles("a", tmp_path, [make_dependency("c")])

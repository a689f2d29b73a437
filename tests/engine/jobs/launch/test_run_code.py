"""The code of a run of a command: as it was queued, and what an edit before the start changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.runs.command_events import CodeChanged, CodeRecorded
from engine.runs.events import Event, WarningEvent
from engine.runs.folder import RunState
from engine.runs.manage import delete_for_good, list_trash, move_to_trash
from support.messages import has_problem
from support.repositories import git, make_repository, write_files
from support.runs.command_owner import CommandRuns

QUEUED = {"device": {"wait": True}}
SNAPSHOT = {"run": {"snapshot": True}}
SCRIPT = "#!/bin/sh\necho version 1\n"


class EditedRuns(CommandRuns):
    """Runs commands in a repository. Once the code of a run is recorded, before it starts, `edit` is called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_repository(self.cwd, run__sh=SCRIPT, __gitignore="data/\n")
        (self.cwd / "run.sh").chmod(0o755)
        git(self.cwd, "commit", "--quiet", "--all", "--message", "executable")
        runs, self.edit = self, lambda: None

        class Events(list[Event]):
            def append(self, event: Event) -> None:
                super().append(event)
                if isinstance(event, CodeRecorded):
                    runs.edit()

        self.events = Events()

    def edit_script(self) -> None:
        write_files(self.cwd, run__sh=SCRIPT.replace("1", "2"))

    def move_git(self) -> None:
        (self.cwd / ".git").rename(self.cwd / "moved")

    def of_type(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def runs(tmp_path: Path) -> EditedRuns:
    return EditedRuns(tmp_path)


def test_edit_between_queueing_and_start_runs_and_is_reported(runs: EditedRuns) -> None:
    runs.edit = runs.edit_script
    assert runs.run("./run.sh", config=QUEUED) == 0
    assert runs.output == ["version 2"]
    [changed] = runs.of_type(CodeChanged)
    assert isinstance(changed, CodeChanged) and changed.files == ["run.sh"]
    assert runs.record.code is not None and "run.sh" in runs.record.code.changed
    assert "run.sh" in runs.log


def test_edit_between_queueing_and_start_does_not_change_a_snapshot(runs: EditedRuns) -> None:
    runs.edit = runs.edit_script
    assert runs.run("./run.sh", config=QUEUED | SNAPSHOT) == 0
    assert runs.output == ["version 1"] and not runs.of_type(CodeChanged)


def test_files_that_other_runs_write_are_no_change_of_the_code(runs: EditedRuns) -> None:
    write_files(runs.cwd, out__txt="old\n")
    runs.edit = lambda: write_files(runs.cwd, out__txt="new\n", results__json="{}\n", conf__yaml="of another run\n")
    runs.run("./run.sh", config=QUEUED)
    assert not runs.of_type(CodeChanged) and runs.record.code is not None and not runs.record.code.is_dirty


def test_new_module_is_a_change_of_the_code(runs: EditedRuns) -> None:
    runs.edit = lambda: write_files(runs.cwd, local_settings__py="lr = 1\n")
    runs.run("./run.sh", config=QUEUED)
    [changed] = runs.of_type(CodeChanged)
    assert isinstance(changed, CodeChanged) and changed.files == ["local_settings.py"]


def test_run_whose_folder_has_left_its_repository_names_it(runs: EditedRuns) -> None:
    runs.edit = runs.move_git
    assert runs.run("./run.sh", config=QUEUED) == 0
    [changed] = runs.of_type(CodeChanged)
    assert isinstance(changed, CodeChanged) and str(runs.cwd) in changed.message


def test_resumed_run_tells_that_its_code_changed_and_later_that_it_did_not(runs: EditedRuns) -> None:
    write_files(runs.cwd, run__sh="#!/bin/sh\nexit 1\n")
    assert runs.run("./run.sh") == 1
    runs.edit_script()
    assert runs.run("./run.sh", config={"run": {"resume": True}}) == 0
    [changed] = runs.of_type(CodeChanged)
    assert isinstance(changed, CodeChanged) and changed.message


def test_resume_of_a_snapshot_uses_the_same_copy(runs: EditedRuns) -> None:
    write_files(runs.cwd, run__sh="#!/bin/sh\ntest -e made && echo resumed && exit 0\ntouch made\nexit 1\n")
    assert runs.run("./run.sh", config=SNAPSHOT) == 1
    (runs.cwd / "run.sh").unlink()
    assert runs.run("./run.sh", config={"run": {"snapshot": True, "resume": True}}) == 0
    assert runs.output == ["resumed"] and not (runs.cwd / "made").exists()


def test_snapshot_runs_in_the_same_subfolder_with_ignored_data(runs: EditedRuns) -> None:
    (runs.cwd / "data").mkdir()
    write_files(runs.cwd / "data", x__txt="hello\n")
    (runs.cwd / "sub").mkdir()
    write_files(runs.cwd / "sub", show__sh="pwd; cat ../data/x.txt; echo $PWD $PYTHONPATH")
    root, runs.cwd = runs.cwd, runs.cwd / "sub"
    environment = {"PATH": os.environ["PATH"], "PWD": str(runs.cwd), "PYTHONPATH": f"{root}/sub:/other"}
    assert runs.run("sh", str(runs.cwd / "show.sh"), config=SNAPSHOT, environment=environment) == 0
    copy = runs.run_folder.code / "copy" / "sub"
    assert runs.output == [str(copy), "hello", f"{copy} {copy}:/other"]
    [recorded] = runs.of_type(CodeRecorded)
    assert isinstance(recorded, CodeRecorded) and recorded.linked == ["data"]


def test_snapshot_imports_a_package_that_is_installed_from_its_source_from_the_copy(runs: EditedRuns) -> None:
    (runs.cwd / "src" / "pack").mkdir(parents=True)
    (runs.cwd / "src" / "pack" / "__init__.py").touch()
    write_files(runs.cwd, pyproject__toml="")
    environment = {"PATH": os.environ["PATH"]}
    program = "import pack; print(pack.__file__)"
    assert runs.run(sys.executable, "-c", program, config=SNAPSHOT, environment=environment) == 0
    assert runs.output[0].startswith(str(runs.run_folder.code / "copy"))


def test_path_behind_an_equals_sign_is_that_in_the_copy_unless_it_leads_out_of_it(runs: EditedRuns) -> None:
    (runs.cwd / "data").mkdir()
    for folder in (runs.cwd, runs.cwd / "data", runs.folder.parent):
        write_files(folder, conf__yaml="lr: 1\n")
    (runs.cwd / "link.yaml").symlink_to(runs.folder.parent / "conf.yaml")
    (runs.cwd / "up").symlink_to("..")
    names = ["conf.yaml", "data/conf.yaml", "link.yaml", "up/conf.yaml", "../conf.yaml", "missing.yaml"]
    words = [f"--config={runs.cwd}/{name}" for name in names]
    assert runs.run("echo", *words, config=SNAPSHOT) == 0
    copy = runs.run_folder.code / "copy"
    # `data` is ignored, so the copy links to it: what leads out of the copy stays as it was typed.
    assert "".join(runs.output).split() == [f"--config={copy}/conf.yaml", *words[1:]]


def test_deletion_of_a_run_keeps_what_its_copy_links_to(runs: EditedRuns) -> None:
    (runs.cwd / "data").mkdir()
    line = "echo more >> run.sh; echo kept > data/kept.txt"
    assert runs.run("sh", "-c", line, config=SNAPSHOT) == 0
    move_to_trash(runs.run_folder)
    [trashed] = list_trash(runs.folder)
    delete_for_good(trashed)
    assert (runs.cwd / "data" / "kept.txt").read_text() == "kept\n"
    assert (runs.cwd / "run.sh").read_text() == SCRIPT


def test_snapshot_outside_of_git_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    runs = CommandRuns(tmp_path)
    with pytest.raises(UsageError) as refused:
        runs.run("true", config=SNAPSHOT)
    assert has_problem(refused.value.problems, "no-repository", "run.snapshot")
    assert not runs.run_folder.path.exists()


def test_run_outside_of_git_has_no_code(tmp_path: Path) -> None:
    runs = CommandRuns(tmp_path)
    assert runs.run("true") == 0
    assert runs.record.code is None and not runs.run_folder.code.exists()


def test_run_without_git_goes_on_with_a_warning(runs: EditedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PATH": os.environ["PATH"]}
    monkeypatch.setenv("PATH", "/nonexistent")
    assert runs.run("/bin/sh", "-c", "true", environment=environment) == 0
    assert any(isinstance(event, WarningEvent) and event.code == "not-installed" for event in runs.events)
    assert runs.record.state is RunState.FINISHED and runs.record.code is None

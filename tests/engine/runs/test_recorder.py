"""The recorder of a run when its files cannot be written: a full disk, and replaced files."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.base.codec import to_builtins
from engine.base.errors import Problem
from engine.config.schema import Config
from engine.runs.events import Event, FlushJournal, RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from engine.runs.recorder import RECORD_INTERVAL_SECONDS, Recorder
from engine.runs.run_row import read_row
from engine.runs.sinks import RETRY_SECONDS, WARNING_INTERVAL_SECONDS, Sink
from engine.watch.tensorboard import EventFolder
from support.foreign import points_of, values_of
from support.gputrain_command import ROOT
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import make_run_folder

FULL_DISK = Path(__file__).with_name("full_disk.py")


class Recording:
    """A recorder with a clock, and what its listener received."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.now, self.shown = folder, 0.0, list[Event]()
        self.recorder = Recorder(folder, Config(), self.shown.append, clock=lambda: self.now)

    def record(self, *events: Event) -> None:
        for event in events:
            self.recorder.record(event)

    def warnings(self) -> list[WarningEvent]:
        """The warnings of the journal, which the listener received too."""
        found = [event for event in self.events() if isinstance(event, WarningEvent)]
        shown = [event for event in self.shown if isinstance(event, WarningEvent)]
        assert [(event.code, event.message) for event in shown] == [(event.code, event.message) for event in found]
        return found

    def events(self) -> list[Event]:
        return list(JournalReader(self.folder.journal).poll())


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    recording = Recording(make_run_folder(tmp_path, "a"))
    yield recording
    recording.recorder.close()


def accuracies(folder: RunFolder, series: str = "val", tag: str = "accuracy") -> dict[int, float]:
    """The accuracy, or another scalar, of each epoch that TensorBoard shows."""
    scalars = EventAccumulator(str(folder.tensorboard / series)).Reload().Scalars(tag)
    return {scalar.step: round(scalar.value, 3) for scalar in scalars}


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    (path / "content").mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [("tensorboard", replace_by_file, "File exists"), ("summary.json", replace_by_folder, "Is a directory")],
)
def test_recorder_switches_failing_file_off_with_one_warning_and_tries_again(
    recording: Recording, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    folder = recording.folder
    recording.record(make_run_started(), make_epoch(1, 0.1))
    damage(folder.path / name)
    # An open file of a deleted folder can be written, so TensorBoard begins new files.
    recording.now += RECORD_INTERVAL_SECONDS
    recording.record(make_run_resumed(10, 1.0), *(make_epoch(number, number / 10) for number in (2, 3)))
    [warning] = recording.warnings()
    shown = "tensorboard/" if name == "tensorboard" else name
    assert warning.code == "switched-off"
    assert all(value in warning.message for value in (shown, f"({reason})", f"{RETRY_SECONDS:g} s"))
    (folder.path / name).rename(folder.path / "damaged")
    recording.record(make_epoch(4, 0.4))
    recording.now += RETRY_SECONDS
    recording.record(make_epoch(5, 0.5))
    switched_off, works_again = recording.warnings()
    assert switched_off == warning
    assert works_again.code == "recovered" and works_again.message.startswith(f"{shown} ")
    assert json.loads(folder.summary.read_text())["epochs"] == 5
    missing = {1} if name == "tensorboard" else set()
    assert accuracies(folder) == {number: number / 10 for number in range(1, 6) if number not in missing}
    assert [event.epoch for event in recording.recorder.history.epochs] == [1, 2, 3, 4, 5]


def test_recorder_says_at_the_end_that_the_journal_was_deleted(recording: Recording) -> None:
    recording.record(make_run_started(), make_epoch(1))
    recording.folder.journal.unlink()
    recording.record(make_epoch(2), RunFinished(state="finished"))
    [warning] = [event for event in recording.shown if isinstance(event, WarningEvent)]
    assert warning.code == "not-recorded" and warning.message.startswith("events.jsonl ")


def test_recorder_writes_loss_and_learning_rate_of_each_step_before_the_epoch_ends(recording: Recording) -> None:
    steps = recording.folder.tensorboard / "steps"
    recording.record(make_run_started(), replace(make_step(2), losses=[2.0, 1.0]))
    assert values_of(points_of(EventFolder(steps)), "loss") == [(1, 2.0), (2, 1.0)]
    assert accuracies(recording.folder, "steps", "learning_rate") == {2: 0.1}
    recording.record(replace(make_step(4), losses=[0.5, None]), make_epoch(1))
    # A session that repeats steps.
    recording.record(make_run_resumed(3, 1.0), replace(make_step(5), losses=[0.25, 0.125]))
    assert accuracies(recording.folder, "steps", "loss") == {1: 2.0, 2: 1.0, 3: 0.5, 4: 0.25, 5: 0.125}


def test_recorder_goes_on_after_any_error_of_tensorboard(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr("engine.runs.tensorboard.scalars_record", fail)
    recording.record(make_run_started(), make_epoch(1), make_epoch(2), RunFinished(state="finished"))
    [warning] = recording.warnings()
    assert warning.code == "switched-off" and warning.message.startswith("tensorboard/ ")
    assert "(RuntimeError: broken)" in warning.message
    assert json.loads(recording.folder.summary.read_text())["state"] == "finished"
    assert recording.events()[-1].type == "run_finished"


def test_recorder_writes_all_files_in_folder_whose_path_is_not_utf8(tmp_path: Path) -> None:
    recording = Recording(make_run_folder(tmp_path / os.fsdecode(b"\xff"), "a"))
    recording.record(make_run_started(), make_epoch(1), RunFinished(state="finished"))
    recording.recorder.close()
    assert recording.warnings() == []
    assert json.loads(recording.folder.summary.read_text())["epochs"] == 1
    [file] = (recording.folder.tensorboard / "val").iterdir()
    assert b"accuracy" in file.read_bytes()


def test_record_of_a_command_that_waits_names_it_also_when_another_process_cancels_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    folder.lock.touch()
    command = {"command": "python train.py --lr 0.1", "command_parameters": {"lr": 0.1}}
    Recorder(folder, Config(), lambda _: None, command=command["command"], parameters={"lr": 0.1}).close()
    assert json.loads(folder.summary.read_text()).items() >= command.items()
    canceller = Recorder(folder, Config(), lambda _: None)
    canceller.record(RunFinished(state="stopped"))
    canceller.close()
    row = read_row(folder)
    assert row is not None and row.state == "stopped" and to_builtins(row.to_json()).items() >= command.items()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond a size: a write up to it is short, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_journal_that_cannot_be_written_catches_up_without_a_torn_line(recording: Recording) -> None:
    folder = recording.folder
    recording.record(make_run_started(), *map(make_step, range(1, 4)))
    size = folder.journal.stat().st_size
    with file_size_limit(size + 20):
        recording.record(*map(make_step, range(4, 11)), FlushJournal())
        assert folder.journal.stat().st_size == size + 20
        problem = recording.recorder.problem
        assert problem is not None and "events.jsonl" in problem and "(File too large)" in problem
    recording.recorder.catch_up()
    assert recording.recorder.problem is None
    assert [event.step for event in recording.events() if event.type == "step"] == list(range(1, 11))  # type: ignore[attr-defined]
    failed, written = recording.warnings()
    assert failed.code == "not-writable" and problem in failed.message and str(folder.path) in failed.message
    assert written.code == "recovered"
    assert all(json.loads(line) for line in folder.journal.read_text().splitlines())


def test_recorder_begins_new_tensorboard_file_after_incomplete_record(recording: Recording) -> None:
    recording.record(make_run_started(), make_epoch(1))
    [file] = (recording.folder.tensorboard / "train").iterdir()
    with file_size_limit(file.stat().st_size + 20):
        recording.record(make_epoch(2))
    recording.now += RETRY_SECONDS
    recording.record(make_epoch(3))
    assert accuracies(recording.folder, "train") == {1: 0.4, 2: 0.4, 3: 0.4}


def test_full_disk_keeps_heartbeat_and_stop_and_says_that_the_end_is_not_recorded(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unprivileged mount namespaces are not available")
    script = 'mount -t tmpfs -o size=500k,nr_inodes=40 tmpfs "$1" && exec "$2" "$3" "$1"'
    command = [unshare, "-Urm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, str(FULL_DISK)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "all seen\n"), done.stderr


class FailingOutput:
    """A sink with a clock, whose output fails on request, and its warnings."""

    def __init__(self) -> None:
        self.now, self.warnings, self.is_handled = 0.0, list[Problem](), False
        self.sink = Sink("x", self.warnings.append, on_error=lambda _: self.is_handled, clock=lambda: self.now)

    def fail_and_recover(self) -> None:
        """Fail, and work again at the next attempt."""
        self.sink.attempt(self._fail)
        self.sink.attempt(lambda: pytest.fail("is switched off"))
        self.now += RETRY_SECONDS
        self.sink.attempt(lambda: None)

    @staticmethod
    def _fail() -> None:
        raise ValueError("no")

    def codes(self) -> list[str]:
        return [warning.code for warning in self.warnings]


def test_sink_warns_once_per_interval_of_output_that_fails_again_and_again() -> None:
    output = FailingOutput()
    while output.now < WARNING_INTERVAL_SECONDS:
        output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"]
    output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"] * 2


def test_sink_does_not_warn_of_handled_error() -> None:
    output = FailingOutput()
    output.is_handled = True
    output.fail_and_recover()
    assert output.codes() == []
    # An error that was handled before takes no place of a warning.
    output.is_handled = False
    output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"]

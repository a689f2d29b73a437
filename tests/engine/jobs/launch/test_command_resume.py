"""A command that starts again in the same run: with which arguments and metrics, and when its Slurm job is requeued."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from engine.base.codec import replace
from engine.base.errors import UsageError
from engine.jobs.command.metric_files import METRICS_FOLDER, OUTPUT_FILE
from engine.jobs.command.run_metrics import metrics_of_run
from engine.jobs.command.spec import read_command, write_command
from engine.jobs.command.try_parse import try_parse
from engine.runs.command_events import CommandResumed, CommandStarted
from engine.runs.control import send_request
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.watch.folders import RunFollower
from engine.watch.text_log import TextLog
from support.foreign import values_of
from support.messages import has_problem
from support.runs.command_owner import CommandRuns, make_command
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder

RESUME = {"run": {"resume": True}}
REQUEUE = {"run": {"requeue": True}}


@pytest.fixture
def runs(tmp_path: Path) -> CommandRuns:
    return CommandRuns(tmp_path)


@pytest.fixture
def calls(runs: CommandRuns, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the calls of `scontrol` in the Slurm job 77."""
    calls, program = runs.folder.parent / "calls", runs.folder.parent / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return calls


def script(runs: CommandRuns, text: str) -> str:
    """Write a script of the working folder, and return what starts it."""
    path = runs.cwd / "train.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return "./train.sh"


def refusal(runs: CommandRuns, *argv: str, **values: object) -> UsageError:
    with pytest.raises(UsageError) as refused:
        runs.run(*argv, **values)
    return refused.value


# Arguments


def test_arguments_of_a_resume_follow_those_of_the_command(runs: CommandRuns) -> None:
    train = script(runs, 'echo "$@"; test $# -gt 2')
    assert runs.run(train, "--lr", "1", on_resume=("--ckpt", "{folder}/last.ckpt")) == 1
    assert runs.run(command=read_command(runs.run_folder), config=RESUME) == 0
    assert runs.output == ["--lr 1", f"--lr 1 --ckpt {runs.folder / 'a'}/last.ckpt"]
    started, resumed = (event for event in runs.events if isinstance(event, CommandStarted))
    assert not isinstance(started, CommandResumed) and isinstance(resumed, CommandResumed)
    assert resumed.command == f"./train.sh --lr 1 --ckpt {runs.folder / 'a'}/last.ckpt"
    # The parameters are those of the run.
    assert runs.record.command_parameters == {"lr": 1}
    assert runs.record.state is RunState.FINISHED


def test_command_that_was_never_started_gets_no_arguments_of_a_resume(runs: CommandRuns) -> None:
    # Its wait in the queue was interrupted.
    command = make_command(runs.cwd, script(runs, 'echo "[$@]"'), on_resume=("--resume",))
    write_command(make_run_folder(runs.folder, "a"), command)
    assert runs.run(command=command, config=RESUME) == 0
    assert runs.output == ["[]"]


# What may go on as the run


@pytest.mark.parametrize("key", ["resume", "requeue"])
def test_other_command_does_not_go_on_as_the_run(runs: CommandRuns, key: str, calls: Path) -> None:
    runs.run("sh", "-c", "exit 3")
    error = refusal(runs, "sh", "-c", "exit 4", config={"run": {key: True}})
    assert has_problem(error.problems, "name-in-use", "a", "sh -c 'exit 3'")
    assert runs.run("sh", "-c", "exit 3", stop_signal="SIGTERM", config={"run": {key: True}}) == 3
    assert read_command(runs.run_folder).stop_signal == "SIGTERM"


def test_same_command_in_another_folder_is_another_one(runs: CommandRuns, tmp_path: Path) -> None:
    runs.run("false")
    error = refusal(runs, command=make_command(tmp_path, "false"), config=RESUME)
    assert has_problem(error.problems, "name-in-use", "a", str(runs.cwd))


def test_command_does_not_go_on_as_a_training(runs: CommandRuns) -> None:
    make_run_folder(runs.folder, "a", make_run_started())
    assert has_problem(refusal(runs, "true", config=RESUME).problems, "name-in-use", "a", "training")


def test_run_that_can_be_resumed_keeps_its_environment_private(runs: CommandRuns) -> None:
    runs.run("false", environment={"PATH": os.environ["PATH"], "TOKEN": "hunter2"})
    assert read_command(runs.run_folder).environment["TOKEN"] == "hunter2"  # noqa: S105
    assert stat.S_IMODE(runs.run_folder.command.stat().st_mode) == 0o600
    renewed = replace(read_command(runs.run_folder), environment={"PATH": os.environ["PATH"], "TOKEN": "other"})
    assert runs.run(command=renewed, config=RESUME) == 1
    assert read_command(runs.run_folder).environment["TOKEN"] == "other"  # noqa: S105


# States and metrics


def test_run_is_live_while_it_is_resumed(runs: CommandRuns) -> None:
    runs.run("sh", "-c", "test -e go && echo ready && exec sleep 60; touch go; exit 1")
    assert runs.record.state is RunState.FAILED
    states = []

    def stop() -> None:
        states.append(
            (runs.record.state, runs.record.exit_code, runs.record.message, RunFolder(runs.folder / "a").is_owned())
        )
        send_request(runs.run_folder.control, "stop")

    runs.when("ready", stop)
    assert runs.run(command=read_command(runs.run_folder), config=RESUME) == 130
    assert states == [(RunState.RUNNING, None, "", True)]
    assert runs.record.state is RunState.STOPPED
    assert sum(isinstance(event, RunFinished) for event in runs.events) == 2


def test_metrics_of_a_resumed_command_continue_its_curves(runs: CommandRuns) -> None:
    for steps, code in (("1 2 3", 1), ("3 4", 0)):
        train = script(runs, f"for step in {steps}; do echo step $step loss=$step.5; done; exit {code}")
        assert runs.run(train, config=RESUME) == code
    metrics = metrics_of_run(runs.run_folder)
    assert metrics is not None
    [reading] = RunFollower(metrics).poll()
    assert values_of(reading.points, "loss") == [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
    assert [runs.record.values[key] for key in ("step", "metrics.loss", "lowest_metrics.loss")] == [4, 4.5, 1.5]


EPOCHS = [
    [f"Epoch {epoch} [{batch}/20] loss: {epoch}.{batch}" for batch in (10, 20)]
    + [
        "Test: [0/2] Acc@1 1 (1)",
        "Test: [1/2] Acc@1 9 (5)",
        f" * Acc@1 {epoch}.5",
        "| lr | 0.1 |",
        f"| f1 | 0.{epoch} |",
    ]
    for epoch in (1, 2, 3)
]


def test_same_text_has_the_same_points_in_each_way_of_reading(runs: CommandRuns, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"{line}\n" for epoch in EPOCHS for line in epoch))
    watched = TextLog(log).poll().points
    whole = make_command(runs.cwd, "cat", str(log))
    runs.run(command=whole)
    parts = script(runs, 'part=$(ls part* 2>/dev/null | wc -l); touch part$part; cat "$0.$part"; test $part = 2')
    for number, lines in enumerate(EPOCHS):
        (runs.cwd / f"train.sh.{number}").write_text("".join(f"{line}\n" for line in lines))
        runs.run(parts, config={"run": {"name": "parts", "resume": True}})
    names = {point.name for point in watched}
    assert names == {"loss", "test/Acc@1", "lr", "f1"}
    tried = try_parse(log).metrics
    for name in names:
        points = values_of(watched, name)
        assert (tried[name].count, tried[name].last_step, tried[name].last) == (len(points), *points[-1])
        for run in ("a", "parts"):
            metrics = metrics_of_run(RunFolder(runs.folder / run))
            assert metrics is not None
            [reading] = RunFollower(metrics).poll()
            assert values_of(reading.points, name) == points


def test_count_of_lines_without_steps_goes_on(runs: CommandRuns) -> None:
    command = make_command(runs.cwd, "sh", "-c", "echo loss: 3; echo loss: 2; exit 1")
    for _ in range(2):
        runs.run(command=command, config=RESUME)
    lines = (runs.folder / "a" / METRICS_FOLDER / OUTPUT_FILE).read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f'{{"step": {step}' for step in range(4)]


def test_record_keeps_its_metrics_until_there_are_new_ones(runs: CommandRuns) -> None:
    lines = "test -e go || { touch go; echo loss: 3; exit 1; }; echo ready; until test -e seen; do sleep 0.05; done"
    command = make_command(runs.cwd, script(runs, lines))
    runs.run(command=command)
    metrics = []

    def look() -> None:
        metrics.append(runs.record.values["metrics.loss"])
        (runs.cwd / "seen").touch()

    thread = runs.when("ready", look)
    runs.run(command=command, config=RESUME)
    thread.join()
    assert metrics == [3]


# Slurm


def test_time_limit_warning_stops_the_command_and_requeues_its_job(runs: CommandRuns, calls: Path) -> None:
    command = make_command(
        runs.cwd, script(runs, 'trap "exit 0" INT; echo "ready$1"; sleep 60 & wait'), on_resume=("--on",)
    )
    runs.when("ready", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert runs.run(command=command, config=REQUEUE) == 0
    assert calls.read_text() == "requeue 77\n"
    assert runs.record.state is RunState.STOPPED
    assert runs.record.message.startswith("stop requested by SIGUSR1; ")
    assert runs.record.message.endswith("; job 77 is requeued")
    # The requeued job starts the same line.
    runs.when("ready--on", lambda: send_request(runs.run_folder.control, "stop"))
    assert runs.run(command=command, config=REQUEUE) == 0
    assert runs.output == ["ready", "ready--on"]
    assert calls.read_text() == "requeue 77\n"


def test_end_is_recorded_after_slurm_has_answered(runs: CommandRuns, calls: Path) -> None:
    scontrol = calls.parent / "bin" / "scontrol"
    count = f"grep -c run_finished {runs.folder}/a/events.jsonl > {calls}"
    scontrol.write_text(f"#!/bin/sh\n{count}\necho no such job >&2; exit 1\n")
    runs.when("ready", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert runs.run("sh", "-c", "echo ready; exec sleep 60", config=REQUEUE) == 130
    assert calls.read_text() == "0\n"
    assert "; job 77 could not be requeued (scontrol: no such job); submit its script again" in runs.record.message


def test_preemption_is_no_reason_to_requeue(runs: CommandRuns, calls: Path) -> None:
    # Slurm does that itself.
    runs.when("ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert runs.run("sh", "-c", "echo ready; exec sleep 60", config=REQUEUE) == 130
    assert (runs.record.state, calls.read_text()) == (RunState.STOPPED, "")


def test_job_is_requeued_only_on_request(runs: CommandRuns, calls: Path) -> None:
    runs.when("ready", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert runs.run("sh", "-c", "echo ready; exec sleep 60") == 130
    assert (runs.record.state, calls.read_text()) == (RunState.STOPPED, "")


def test_command_that_slurm_warns_too_is_not_killed_by_that(runs: CommandRuns, calls: Path) -> None:
    # `srun` sends the signal to all processes of the step.
    assert runs.run("sh", "-c", "kill -USR1 $$; echo alive", config=REQUEUE) == 0
    assert runs.run("sh", "-c", "kill -USR1 $$; echo alive", config={"run": {"name": "b"}}) == 128 + signal.SIGUSR1


def test_command_that_dies_of_the_signal_of_its_supervisor_was_stopped(runs: CommandRuns) -> None:
    # Slurm and a host that shuts down send SIGTERM to all processes.
    assert runs.run("sh", "-c", f"echo ready; kill -TERM {os.getpid()} $$; sleep 60") == 128 + signal.SIGTERM
    assert runs.record.state is RunState.STOPPED


def test_requeue_outside_of_slurm_is_reported(runs: CommandRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert runs.run("true", config=REQUEUE) == 0
    assert "no-effect" in [event.code for event in runs.events if isinstance(event, WarningEvent)]

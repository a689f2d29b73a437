"""What the run of a command records of its failure, a stall and a loss that is not finite."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from engine.command.stop import StopSequence
from engine.runs.control import send_request
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunState
from engine.utils.errors import UsageError
from support.frozen_disk import frozen_disk, needs_frozen_disk
from support.gputrain_command import wait_for
from support.messages import has_problem
from support.runs.command_owner import CommandRuns

GRACE_TIMES = ("grace_s", "leftover_grace_s", "kill_grace_s")


@pytest.fixture
def runs(tmp_path: Path) -> CommandRuns:
    return CommandRuns(tmp_path)


def warnings(runs: CommandRuns, code: str) -> list[str]:
    return [event.message for event in runs.events if isinstance(event, WarningEvent) and event.code == code]


def test_restart_records_why(runs: CommandRuns) -> None:
    runs.run("sh", "-c", "echo 'ValueError: bad'; exit 2", config={"run": {"max_restarts": 1}})
    [restarted] = warnings(runs, "process-failed")
    assert restarted.startswith("ended with exit code 2: ValueError: bad; starting the command again")
    assert sum(isinstance(event, RunFinished) for event in runs.events) == 1


@pytest.mark.parametrize("values", ["0.5 nan", "nan"])
def test_loss_that_is_not_finite_is_reported_once(runs: CommandRuns, values: str) -> None:
    script = f'i=0; for loss in {values} nan; do i=$((i+1)); echo "step $i loss=$loss"; done'
    runs.run("sh", "-c", script)
    [message] = warnings(runs, "non-finite")
    assert message.startswith("loss is NaN or infinite at step ")


def test_other_metrics_may_have_no_value(runs: CommandRuns) -> None:
    runs.run("sh", "-c", 'echo "step 1 loss=0.5 grad_norm=inf"')
    assert warnings(runs, "non-finite") == []


def test_stall_is_reported(runs: CommandRuns) -> None:
    # It ends when the stall is recorded, however late that is.
    script = (
        "echo start; for i in $(seq 300); do grep -q 'stall[e]d' {folder}/events.jsonl && exit; sleep 0.1; done; exit 1"
    )
    assert runs.run("sh", "-c", script, config={"notify": {"stall_minutes": 0.01}}) == 0
    [message] = warnings(runs, "stalled")
    assert message.startswith("no output, no metric and no work on its GPUs for ")


def test_progress_bar_without_a_new_line_is_no_stall(runs: CommandRuns) -> None:
    script = r'for i in 1 2 3 4 5 6 7 8; do printf "\rloading $i"; sleep 0.2; done'
    runs.run("sh", "-c", script, config={"notify": {"stall_minutes": 0.015}})
    assert warnings(runs, "stalled") == []


def test_program_that_is_gone_at_a_restart_fails_the_run(runs: CommandRuns) -> None:
    script = runs.cwd / "train.sh"
    script.write_text("#!/bin/sh\nrm train.sh; exit 1\n")
    script.chmod(0o755)
    with pytest.raises(UsageError):
        runs.run("./train.sh", config={"run": {"max_restarts": 1}})
    assert runs.record.state is RunState.FAILED


def test_folder_that_is_swapped_before_a_restart_is_not_used(runs: CommandRuns) -> None:
    script = 'mv "$PWD" "$PWD.old"; mkdir "$PWD"; exit 1'
    with pytest.raises(UsageError) as refused:
        runs.run("sh", "-c", script, config={"run": {"max_restarts": 1}})
    assert has_problem(refused.value.problems, "untrusted-code", "--cwd")


def test_restarts_share_the_time_limit(runs: CommandRuns) -> None:
    config = {"run": {"max_restarts": 20}, "queue": {"time_limit": 1.5 / 60}}
    runs.run("sh", "-c", "sleep 0.3; exit 1", config=config)
    assert runs.record.state is RunState.STOPPED
    assert "stop requested by queue.time_limit" in runs.record.message


def test_failure_shows_no_value_of_a_secret_variable(runs: CommandRuns) -> None:
    environment = {"PATH": os.environ["PATH"], "MY_TOKEN": "abc-123-def"}
    runs.run("sh", "-c", 'echo "login with $MY_TOKEN failed"; exit 1', environment=environment)
    assert runs.record.message == "ended with exit code 1: login with *** failed"


@needs_frozen_disk
def test_run_ends_beside_a_process_that_cannot_be_killed_and_is_not_restarted(
    runs: CommandRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopSequence.__init__, "__kwdefaults__", dict.fromkeys(GRACE_TIMES, 0.1))
    with frozen_disk(tmp_path) as (mount, thaw):
        stopping = runs.when("start", lambda: send_request(runs.run_folder.control, "stop"))
        code = runs.run("sh", "-c", f"echo start; echo x > {mount}/x", config={"run": {"max_restarts": 1}})
        stopping.join()
        started = runs.run_folder.history().command
        assert started is not None
        assert (code, runs.record.state) == (137, RunState.STOPPED)
        for message in (runs.record.message, *warnings(runs, "process-left")):
            assert f"sh ({started.pid})" in message and "blocked on I/O" in message
        thaw()
        wait_for(lambda: not psutil.pid_exists(started.pid), "the end of the process")

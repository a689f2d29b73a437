"""The run of a command: what its folder records, which exit code it has, and how it is stopped and started again."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import psutil
import pytest

from engine.base.errors import UsageError
from engine.config.code_trust import CodeTrust
from engine.config.settings import Limits
from engine.jobs.command.metric_files import START_SLACK_SECONDS
from engine.jobs.command.process_tree import StopSequence
from engine.jobs.command.spec import read_command
from engine.runs.control import send_request
from engine.runs.events import ControlEvent, RunFinished, WarningEvent
from engine.runs.folder import RunState
from support.frozen_disk import frozen_disk, needs_frozen_disk
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.gputrain_command import wait_for
from support.messages import has_problem
from support.runs.command_owner import CommandRuns, stdin_with


@pytest.fixture
def runs(tmp_path: Path) -> CommandRuns:
    return CommandRuns(tmp_path)


def refusal(runs: CommandRuns, *argv: str, **values: object) -> UsageError:
    with pytest.raises(UsageError) as refused:
        runs.run(*argv, **values)
    return refused.value


def test_run_of_command_records_its_output_and_its_end(runs: CommandRuns) -> None:
    assert runs.run("sh", "-c", "echo out; echo err >&2") == 0
    assert sorted(runs.output) == ["err", "out"]
    assert "out\n" in runs.log and "err\n" in runs.log
    assert (runs.record.state, runs.record.exit_code, runs.record.devices) == (RunState.FINISHED, 0, "the CPU")
    assert runs.record.command == "sh -c 'echo out; echo err >&2'"
    history = runs.run_folder.history()
    assert history.command is not None and history.finished is not None and history.started is None


@pytest.mark.parametrize(
    ("line", "code", "recorded"), [("exit 7", 7, 7), ("kill -9 $$", 137, -9), ("kill -2 $$", 130, -2)]
)
def test_exit_code_is_that_of_the_command(runs: CommandRuns, line: str, code: int, recorded: int) -> None:
    assert runs.run("sh", "-c", line) == code
    assert (runs.record.state, runs.record.exit_code) == (RunState.FAILED, recorded)


def test_folder_as_a_command_is_called_a_folder(runs: CommandRuns) -> None:
    (runs.cwd / "adir").mkdir()
    [problem] = refusal(runs, "./adir").problems
    assert has_problem([problem], "command-not-executable", "./adir", "folder") and "chmod" not in str(problem)


@pytest.mark.parametrize("folder", ["bin", "."])
def test_relative_folder_of_path_is_below_the_working_folder(runs: CommandRuns, folder: str) -> None:
    tool = runs.cwd / folder / "tool"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    assert runs.run("tool", environment={"PATH": f"{folder}:{os.environ['PATH']}"}) == 0
    assert runs.output == ["found"]


def test_command_without_a_valid_interpreter_leaves_no_run(runs: CommandRuns) -> None:
    script = runs.cwd / "train"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert has_problem(refusal(runs, "./train").problems, "command-not-executable", "./train")
    assert not runs.folder.exists()


def test_command_runs_in_its_folder_with_its_environment_only(runs: CommandRuns) -> None:
    environment = {"PATH": os.environ["PATH"], "MINE": "yes"}
    runs.run("sh", "-c", "pwd; echo $MINE-$HOME-$PYTHONUNBUFFERED", environment=environment)
    assert runs.output == [str(runs.cwd), "yes--1"]


def test_command_has_no_gpu_and_no_terminal_input_on_the_cpu(runs: CommandRuns) -> None:
    runs.run("sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"; cat; test -t 1 && echo terminal')
    assert runs.output == ["[]", "terminal"]


def test_command_finds_the_size_of_its_terminal_and_nothing_to_read_there(runs: CommandRuns) -> None:
    runs.run("sh", "-c", "stty size </dev/tty; read line </dev/tty || echo end")
    assert runs.output == ["48 132", "end"]


def test_metrics_of_output_and_of_own_file_are_in_the_record(runs: CommandRuns) -> None:
    program = 'echo "step 1 loss=0.5"; echo "step 2 loss=0.25"; echo \'{"step": 9, "acc": 0.75}\' >> $GPUTRAIN_METRICS'
    runs.run("sh", "-c", program)
    record = runs.record
    bounds = [record.values[f"{group}.loss"] for group in ("metrics", "lowest_metrics", "highest_metrics")]
    assert bounds == [0.25, 0.25, 0.5]
    assert record.values["metrics.acc"] == 0.75
    assert record.values.get("step") == 9


def test_metric_file_below_the_working_folder_is_found(runs: CommandRuns) -> None:
    old = runs.cwd / "old.jsonl"
    old.write_text('{"step": 1, "before": 1.0}\n')
    wait_for(lambda: time.time() > old.stat().st_ctime + START_SLACK_SECONDS, "an old file")
    runs.run("sh", "-c", 'mkdir logs; echo \'{"step": 3, "score": 0.125}\' > logs/new.jsonl')
    assert runs.record.values["metrics.score"] == 0.125 and [*runs.record.metric_keys] == ["score"]


@pytest.mark.parametrize(("waits", "output"), [(False, ["hello"]), (True, [])])
def test_pipe_as_stdin_is_that_of_the_command_unless_it_waits(
    runs: CommandRuns, waits: bool, output: list[str]
) -> None:
    with stdin_with("hello\n"):
        assert runs.run("cat", config={"device": {"wait": waits}}) == 0
    assert runs.output == output


def test_invalid_pattern_is_refused(runs: CommandRuns) -> None:
    assert "--parse" in str(refusal(runs, "true", parse=("(",)))
    assert not runs.folder.exists()


def test_command_file_is_private_and_loses_the_environment_at_the_end(runs: CommandRuns) -> None:
    modes = []
    runs.when("ready", lambda: modes.append(stat.S_IMODE(runs.run_folder.command.stat().st_mode)))
    runs.run("sh", "-c", "echo ready; sleep 0.3")
    assert modes == [0o600]
    assert read_command(runs.run_folder).environment == {}


def test_second_stop_request_kills_a_command_that_ignores_the_first(runs: CommandRuns) -> None:
    control = runs.run_folder.control

    def stop_twice() -> None:
        send_request(control, "stop")
        wait_for(lambda: any(isinstance(event, ControlEvent) for event in runs.events), "the answer")
        send_request(control, "stop")

    runs.when("ready", stop_twice)
    assert runs.run("sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 1; done") == 137
    outcomes = [event.outcome for event in runs.events if isinstance(event, ControlEvent)]
    assert outcomes[1:] == ["its processes are killed"] and runs.record.state is RunState.STOPPED


def test_stop_requests_that_arrive_together_are_one(runs: CommandRuns) -> None:
    def stop_twice() -> None:
        # Both are there when the supervisor looks: the first rename publishes them.
        folder = runs.run_folder.path / "control.new"
        for _ in range(2):
            send_request(folder, "stop")
        runs.run_folder.control.rmdir()
        folder.rename(runs.run_folder.control)

    runs.when("ready", stop_twice)
    assert runs.run("sh", "-c", "trap 'exit 4' INT; echo ready; while :; do sleep 0.1; done") == 4


def test_working_folder_that_is_moved_is_named_once(runs: CommandRuns) -> None:
    runs.when("ready", lambda: runs.cwd.rename(runs.cwd.with_name("moved")))
    runs.run("sh", "-c", f"echo ready; until [ -e {runs.cwd.with_name('moved')} ]; do sleep 0.1; done; sleep 2")
    warnings = [event for event in runs.events if isinstance(event, WarningEvent) and event.code == "not-recorded"]
    assert [str(runs.cwd) in warning.message for warning in warnings] == [True]


def test_other_requests_are_refused(runs: CommandRuns) -> None:
    runs.when("ready", lambda: send_request(runs.run_folder.control, "pause"))
    runs.run("sh", "-c", "echo ready; sleep 4")
    assert "refused" in next(event.outcome for event in runs.events if isinstance(event, ControlEvent))
    assert runs.record.state is RunState.FINISHED


def test_limit_of_hours_is_the_time_limit_of_a_command_without_one(
    runs: CommandRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.jobs.launch.supervise.read_limits", lambda: Limits(hours=0.0001))
    assert runs.run("sleep", "60") == 130
    assert "limits.hours" in runs.record.message


def test_processes_that_are_left_behind_are_ended_with_a_warning(runs: CommandRuns) -> None:
    assert runs.run("sh", "-c", "sleep 61 & exit 0") == 0
    assert "process-left" in [event.code for event in runs.events if isinstance(event, WarningEvent)]


def test_finished_command_is_not_run_again(runs: CommandRuns) -> None:
    runs.run("true")
    runs.events.clear()
    assert runs.run("true", config={"run": {"resume": True}}) == 0
    assert [event.code for event in runs.events if isinstance(event, WarningEvent)] == ["already-finished"]


def test_result_of_a_command_has_the_name_that_it_prints(runs: CommandRuns) -> None:
    runs.run("echo", "Epoch 1/1 val_acc=0.5")
    assert runs.record.message == "val_acc 0.5"


def test_other_folder_in_place_of_the_working_folder_is_refused(runs: CommandRuns) -> None:
    runs.run("sh", "-c", "exit 3")
    command = read_command(runs.run_folder)
    runs.cwd.rename(runs.cwd.with_name("moved"))
    runs.cwd.mkdir()
    assert has_problem(
        refusal(runs, command=command, config={"run": {"resume": True}}).problems, "untrusted-code", "--cwd"
    )
    assert runs.run(command=command, config={"run": {"resume": True}}, code_trust=CodeTrust(granted=True)) == 3


def test_record_that_the_end_of_the_output_ends_is_kept(runs: CommandRuns) -> None:
    assert runs.run("printf", "| ep_rew_mean | 9 |\\n| total_timesteps | 512 |\\n") == 0
    assert runs.record.values["metrics.ep_rew_mean"] == 9


def test_run_without_metrics_names_the_line_most_like_one(runs: CommandRuns) -> None:
    runs.run("echo", "the loss of the whole long run that we made today was about 0.5 in the end")
    warnings = [event.message for event in runs.events if isinstance(event, WarningEvent)]
    assert [("was about 0.5" in message, "--parse" in message) for message in warnings] == [(True, True)]


def test_what_was_left_out_of_the_output_is_said_once(runs: CommandRuns) -> None:
    lines = "[rank0]: step 1 loss 3\n[rank1]: step 1 loss 4\nTest: [1/9] loss 3\nTest: [9/9] loss 2\n"
    runs.run("printf", lines)
    [warning] = [event for event in runs.events if isinstance(event, WarningEvent)]
    assert "other ranks" in warning.message and "validation" in warning.message


def test_run_without_anything_like_a_metric_warns_of_nothing(runs: CommandRuns) -> None:
    runs.run("echo", "done in 3 s")
    assert not [event for event in runs.events if isinstance(event, WarningEvent)]


SHOW = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $N $1"
ENVIRONMENT = {"PATH": os.environ["PATH"], "N": "{gpus} of {run}", "OTHER": "{gpus}"}


@pytest.fixture
def gpu_runs(tmp_path: Path, loaded_gpu_host: FakeGpuHost) -> CommandRuns:
    loaded_gpu_host.set_scene([gpu_line(index) for index in range(4)])
    return CommandRuns(tmp_path)


def test_command_gets_reserved_gpus_in_variables_and_placeholders(gpu_runs: CommandRuns) -> None:
    gpus = {"device": {"gpus": f"{gpu_uuid(1)},{gpu_uuid(3)}"}}
    argv = ("sh", "-c", f"{SHOW} $OTHER", "sh", "{ids}")
    gpu_runs.run(*argv, config=gpus, environment=ENVIRONMENT, expanded=("N",))
    assert gpu_runs.output == ["1,3 PCI_BUS_ID 2 of a 1,3 {gpus}"]
    assert gpu_runs.record.state == "finished"


def test_run_warns_of_use_of_gpu_that_is_not_reserved(
    gpu_runs: CommandRuns, loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run in a container, where the PIDs of a driver are not those of the container.
    use_gpu = f"echo process 0 $$ 900 compute >> {loaded_gpu_host.scene}"
    # The journal has the command, too, which must not match itself.
    wait = "for i in $(seq 150); do grep -q 'reserved [3]' {folder}/events.jsonl && exit; sleep 0.2; done"
    gpu_runs.run("sh", "-c", f"{use_gpu}; {wait}", config={"device": {"gpus": "3"}})
    warnings = [event.message for event in gpu_runs.events if isinstance(event, WarningEvent)]
    assert any("run a computes on GPU 0, reserved 3" in message for message in warnings), warnings


GRACE_TIMES = ("grace_s", "leftover_grace_s", "kill_grace_s")


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

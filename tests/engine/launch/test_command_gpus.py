"""The environment that a command gets for its reserved GPUs, and the warning when it uses other GPUs, on fake GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runs.events import WarningEvent
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.runs.command_owner import CommandRuns

SHOW = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $N $1"
ENVIRONMENT = {"PATH": os.environ["PATH"], "N": "{gpus} of {run}", "OTHER": "{gpus}"}


@pytest.fixture
def runs(tmp_path: Path, loaded_gpu_host: FakeGpuHost) -> CommandRuns:
    loaded_gpu_host.set_scene([gpu_line(index) for index in range(4)])
    return CommandRuns(tmp_path)


def test_command_gets_reserved_gpus_in_variables_and_placeholders(runs: CommandRuns) -> None:
    gpus = {"device": {"gpus": f"{gpu_uuid(1)},{gpu_uuid(3)}"}}
    argv = ("sh", "-c", f"{SHOW} $OTHER", "sh", "{ids}")
    runs.run(*argv, config=gpus, environment=ENVIRONMENT, expanded=("N",))
    assert runs.output == ["1,3 PCI_BUS_ID 2 of a 1,3 {gpus}"]
    assert runs.record.state == "finished"


def test_run_warns_of_use_of_gpu_that_is_not_reserved(
    runs: CommandRuns, loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run in a container, where the PIDs of a driver are not those of the container.
    use_gpu = f"echo process 0 $$ 900 compute >> {loaded_gpu_host.scene}"
    # The journal has the command, too, which must not match itself.
    wait = "for i in $(seq 150); do grep -q 'reserved [3]' {folder}/events.jsonl && exit; sleep 0.2; done"
    runs.run("sh", "-c", f"{use_gpu}; {wait}", config={"device": {"gpus": "3"}})
    warnings = [event.message for event in runs.events if isinstance(event, WarningEvent)]
    assert any("run a computes on GPU 0, reserved 3" in message for message in warnings), warnings

"""The runs of the GPU hour on two fake GPUs."""

from __future__ import annotations

import os
import sys

import pytest

from support.gpu.fake_cuda import Rehearsal
from support.gputrain_command import ROOT


@pytest.mark.rehearsal
@pytest.mark.timeout(600)
def test_gpu_hour_uses_both_gpus_and_holds_none_itself(rehearsal: Rehearsal) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), rehearsal.environment["PYTHONPATH"]])
    results = rehearsal.folder / "RESULTS.md"
    results.touch()
    command = [sys.executable, str(ROOT / "tests" / "bench" / "gpu_hour.py"), "runs", "--rehearsal"]
    hour = rehearsal.start(*command, f"--results={results}", env=rehearsal.environment | {"PYTHONPATH": path})
    _, errors = hour.communicate(timeout=500)
    assert hour.returncode == 0, f"{errors}{results.read_text()}"
    assert "ResNet-18 on 2 GPUs" in results.read_text()
    # `--gpus free:1` refuses a GPU on which this process has a context.
    contexts = {pid for pid, lines in rehearsal.cuda_log().items() if any("context" in line for line in lines)}
    assert contexts and hour.pid not in contexts

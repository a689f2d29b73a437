"""The first stage of the GPU hour on two fake GPUs."""

from __future__ import annotations

import json
import os
import sys

import pytest

from support.gpu.fake_cuda import Rehearsal
from support.gputrain_command import ROOT


@pytest.mark.rehearsal
@pytest.mark.timeout(600)
def test_gpu_hour_stage_uses_both_gpus_and_holds_none_itself(rehearsal: Rehearsal) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), rehearsal.environment["PYTHONPATH"]])
    kept = {key: value for key, value in rehearsal.environment.items() if not key.startswith("PYTEST_")}
    folders = [f"--out={rehearsal.folder / 'out'}", f"--work={rehearsal.folder / 'work'}"]
    stage = rehearsal.start(
        sys.executable, str(ROOT / "tests" / "gpu_hour"), "a", "--one-stage", *folders, env=kept | {"PYTHONPATH": path}
    )
    _, errors = stage.communicate(timeout=500)
    assert stage.returncode == 0, errors
    report = json.loads((rehearsal.folder / "out" / "a-smoke.json").read_text())
    assert report["complete"]
    assert {row["state"] for row in report["rows"]} == {"ok"}
    assert len(report["machine"]["gpus"]) == 2
    # `--gpus free:1` refuses a GPU on which the stage itself has a context.
    contexts = {pid for pid, lines in rehearsal.cuda_log().items() if any("context" in line for line in lines)}
    assert contexts
    assert stage.pid not in contexts

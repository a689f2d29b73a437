"""The loader of the tests: everything that it can install is active at the same time."""

from __future__ import annotations

import inspect
from itertools import chain

import pytest

from engine.training import loop
from support.gpu.fake_cuda import Rehearsal, run_started
from support.gpu.fake_gpu_host import gpu_uuid
from support.gputrain_command import read_events


@pytest.mark.rehearsal
def test_loader_installs_everything_in_one_run(rehearsal: Rehearsal) -> None:
    coverage = pytest.importorskip("coverage")
    settings = rehearsal.folder / "coverage.ini"
    settings.write_text(f"[run]\nparallel = true\ndata_file = {rehearsal.folder}/measured\nsource = engine\n")
    rehearsal.inject_fault("nan", 1, 3)
    no_library = {"FAKE_NVML_IN_PYTHON": "1", "LD_LIBRARY_PATH": ""}
    options = ["--epochs", "1", "--gpus", "free:2", "optim.nonfinite=skip"]
    run = rehearsal.run("all", "digits", *options, COVERAGE_PROCESS_START=str(settings), **no_library)

    assert [event["skipped_steps"] for event in read_events(run) if event["type"] == "epoch"] == [1], "the fault"
    assert run_started(run)["devices"] == [gpu_uuid(0), gpu_uuid(1)], "the fake NVML"
    assert any("nccl: rank 1 of 2 on device 1" in lines for lines in rehearsal.cuda_log().values()), "the fake CUDA"
    data = [coverage.CoverageData(str(path)) for path in rehearsal.folder.glob("measured.*")]
    for each in data:
        each.read()
    lines, first = inspect.getsourcelines(loop.forward_backward)
    measured = set(chain.from_iterable(each.lines(loop.__file__) or [] for each in data))
    assert first + len(lines) - 1 in measured, "coverage of the ranks, which exit by os._exit"

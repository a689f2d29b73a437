"""A run continues on other devices than those it started on."""

from __future__ import annotations

import pytest

from support.gpu.fake_cuda import Rehearsal, epochs_of, losses_of
from support.messages import says

LIGHT = ("digits", "--model", "linear", "run.log_every=1", "--lr", "0.01", "schedule.name=constant")
GPUS, CPU = ("device.gpus=free:2",), ("device.gpus=cpu", "device.ranks=2")


def assert_continues(rehearsal: Rehearsal, first: tuple[str, ...], then: tuple[str, ...]) -> None:
    parts = rehearsal.run("parts", *LIGHT, *first, "--epochs", "1")
    resumed = rehearsal("resume", "parts", "run.epochs=2", *then)
    assert resumed.returncode == 0, resumed.stderr
    whole = rehearsal.run("whole", *LIGHT, *CPU, "--epochs", "2")
    assert [epoch["epoch"] for epoch in epochs_of(parts)] == [1, 2]
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-3)


@pytest.mark.rehearsal
def test_resume_continues_gpu_run_on_cpu(rehearsal: Rehearsal) -> None:
    assert_continues(rehearsal, GPUS, CPU)


@pytest.mark.rehearsal
@pytest.mark.parametrize("first", [GPUS, CPU], ids=["gpus", "cpu"])
def test_resume_continues_run_on_gpus(rehearsal: Rehearsal, first: tuple[str, ...]) -> None:
    assert_continues(rehearsal, first, GPUS)


@pytest.mark.rehearsal
def test_resume_of_dp_run_reports_random_numbers_that_differ(rehearsal: Rehearsal) -> None:
    rehearsal.run("dp", *LIGHT, *GPUS, "device.parallel=dp", "--epochs", "1")
    resumed = rehearsal("resume", "dp", "run.epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert says(resumed.stderr, "resume-differs", "device.parallel=dp")

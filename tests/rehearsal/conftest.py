"""A run on fake GPUs that several tests read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.gpu.fake_cuda import DdpRun, Rehearsal
from support.gpu.fake_gpu_host import FakeGpuHost
from support.gputrain_command import isolated_gputrain


@pytest.fixture(scope="session")
def ddp_run(
    tmp_path_factory: pytest.TempPathFactory, fake_driver: dict[str, str], fake_cuda: dict[str, str]
) -> Iterator[DdpRun]:
    folder = tmp_path_factory.mktemp("rehearsal")
    arguments = ("digits", "--epochs", "2", "run.log_every=1")
    for gputrain in isolated_gputrain(folder):
        rehearsal = Rehearsal(gputrain, FakeGpuHost(folder, fake_driver), fake_cuda)
        path = rehearsal.run("ddp", *arguments, "--gpus", "free:2")
        yield DdpRun(rehearsal, arguments, path, rehearsal.cuda_log())

"""The table of `gputrain gpus`, and its message on a host without an NVIDIA driver."""

from __future__ import annotations

from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation import Reservation
from engine.gpus.snapshot import DRIVER, Measurement, Snapshot
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, gpu_uuid, sample_gpus
from support.messages import has_problem
from tui.screens.phrases import no_driver_problem
from tui.screens.tables.gpus import gpu_lines


def test_no_driver_problem_says_that_runs_use_the_cpu() -> None:
    unknown: Measurement[str] = Measurement(None, 0.0, "no driver")
    problem = no_driver_problem(
        Snapshot(time=0.0, source=DRIVER, host="host", driver=unknown, cuda=unknown, error="no driver", gpus=())
    )
    assert has_problem([problem], "driver-unavailable", "", "host", "(no driver)")
    assert problem.message.endswith((" core.", " cores."))


def test_gpu_lines_show_readings_and_users_of_each_mig_instance(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1, privileged=0),
        "instance 0 uuid=MIG-1 gi=1 sm=3 tensor=1 name=NVIDIA_H100_80GB_HBM3_MIG_1g.10gb",
        "instance 0 uuid=MIG-2 gi=2 sm=80 tensor=50 used=9000 name=NVIDIA_H100_80GB_HBM3_MIG_1g.10gb",
        f"process 0 {UNKNOWN_PID} 8900 compute 2",
        gpu_line(1),
    )
    lines = [line.plain.split() for line in gpu_lines(sample_gpus(), 80, instances=True)[1:]]
    assert [line[0] for line in lines] == ["0", "0:1", "0:2", "1"]
    assert lines[1][1:] == ["MIG", "1g.10gb", "–", "3%", "0.0/9.5", "–/–", "–", "free"]
    assert lines[2][1:5] == ["MIG", "1g.10gb", "–", "80%"]
    assert lines[2][-2:] == ["pid", str(UNKNOWN_PID)]


def test_gpu_lines_show_memory_that_runs_have_reserved(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0))
    runs = [Reservation(), Reservation()]
    for name, run in zip("ab", runs, strict=True):
        run.set_terms(QueueTerms(min_free=15 << 30))
        run.reserve([gpu_uuid(0)], "free:1", [gpu_uuid(0)], name)
    [line] = gpu_lines(sample_gpus(), 160)[1:]
    assert line.plain.rstrip().endswith("a, b, 30 GiB reserved")
    for run in runs:
        run.release()

"""Commands and launchers on a host with GPUs: evaluate, predict, doctor, bench, MIG instances and torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.gpu.fake_cuda import DdpRun, Rehearsal, nccl_backend, run_started
from support.gpu.fake_gpu_host import gpu_line, gpu_uuid
from support.gputrain_command import GPUTRAIN, read_events
from support.messages import says
from support.runs.factories import find_free_port

LIGHT = ("digits", "--model", "linear", "--epochs", "1")
MIG_UUIDS = ["MIG-aaaa0000-1111-2222-3333-444444444444", "MIG-bbbb0000-1111-2222-3333-444444444444"]


@pytest.mark.rehearsal
def test_evaluate_on_gpu_equals_validation_of_run(ddp_run: DdpRun) -> None:
    done = ddp_run.gputrain("evaluate", "ddp", "--gpus", "0", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads((ddp_run.path / "summary.json").read_text())
    assert json.loads(done.stdout)["top1"] == pytest.approx(summary["best_val_accuracy"])


@pytest.mark.rehearsal
def test_predict_on_gpu_equals_cpu(ddp_run: DdpRun) -> None:
    image = ddp_run.gputrain.folder / "image.png"
    Image.effect_noise((8, 8), 60).save(image)
    answers = [ddp_run.gputrain("predict", "ddp", str(image), "--gpus", gpus, "--json") for gpus in ("1", "cpu")]
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert json.loads(answers[0].stdout) == json.loads(answers[1].stdout)


@pytest.mark.rehearsal
def test_doctor_finds_two_usable_gpus(rehearsal: Rehearsal) -> None:
    done = rehearsal("doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if check["state"] == "problem"] == [], done.stderr
    found = {check["name"]: check["found"] for check in checks}
    assert "for CUDA" in found["CUDA"] and {"GPU 0", "GPU 1"} <= found.keys()
    assert done.returncode == 0


@pytest.mark.rehearsal
def test_bench_measures_one_and_two_gpus(rehearsal: Rehearsal) -> None:
    done = rehearsal("bench", *LIGHT[:3], "--gpus", "free:2", "--epochs", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert [speed["ranks"] for speed in json.loads(done.stdout)["speeds"]] == [1, 2]


@pytest.mark.rehearsal
def test_run_trains_on_mig_instance(rehearsal: Rehearsal) -> None:
    instances = [f"instance 0 uuid={uuid} gi={number} ci=0" for number, uuid in enumerate(MIG_UUIDS, 1)]
    rehearsal.host.set_scene(gpu_line(0, used=100, mig=1), instances)
    run = rehearsal.run("mig", *LIGHT, "--gpus", MIG_UUIDS[0])
    assert (run_started(run)["backend"], run_started(run)["devices"]) == ("gloo", MIG_UUIDS[:1])
    samples = [gpu for event in read_events(run) if event["type"] == "gpus" for gpu in event["gpus"]]
    assert {(gpu["uuid"], gpu["memory_used"]) for gpu in samples} == {(MIG_UUIDS[0], 20 << 20)}


@pytest.mark.rehearsal
def test_torchrun_workers_that_see_one_gpu_each_use_both(rehearsal: Rehearsal) -> None:
    worker = rehearsal.folder / "worker.sh"
    worker.write_text(f'#!/bin/sh\nCUDA_VISIBLE_DEVICES=$LOCAL_RANK exec {GPUTRAIN} "$@"\n')
    worker.chmod(0o755)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = ["--nproc-per-node", "2", "--master-port", str(find_free_port()), "--no-python", str(worker)]
    agent = rehearsal.start(torchrun, *options, "run", "--headless", *LIGHT, "--name", "workers", "--gpus", "all")
    _, messages = agent.communicate(timeout=200)
    assert agent.returncode == 0, messages
    started = run_started(rehearsal.runs / "workers")
    assert (started["backend"], started["devices"]) == (nccl_backend(), [gpu_uuid(0), gpu_uuid(1)])


@pytest.mark.rehearsal
def test_gpu_indices_follow_order_of_cuda(rehearsal: Rehearsal) -> None:
    """Without CUDA_DEVICE_ORDER=PCI_BUS_ID, only CUDA itself knows the order of the indices."""
    run = rehearsal.run("one", *LIGHT, "--gpus", "all", CUDA_VISIBLE_DEVICES="1")
    assert run_started(run)["devices"] == [gpu_uuid(1)]


@pytest.mark.rehearsal
def test_run_on_gpus_that_torch_cannot_use_is_refused(rehearsal: Rehearsal) -> None:
    done = rehearsal("run", "--headless", *LIGHT, "--gpus", "0", LD_PRELOAD="")
    assert done.returncode == 2
    assert says(done.stderr, "not-supported", "error: device.gpus: ", "--gpus cpu")


@pytest.mark.rehearsal
def test_bfloat16_on_gpu_without_it_is_refused(rehearsal: Rehearsal) -> None:
    done = rehearsal("run", "--headless", *LIGHT, "--gpus", "0", "--amp", "bf16", FAKE_CUDA_CAPABILITY="7")
    assert done.returncode == 2
    assert says(done.stderr, "not-supported", "error: precision.amp: ", "bfloat16", "fp16")

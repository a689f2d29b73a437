"""Ranks that compile nothing do not import torch's compiler, unless torch differs from the version patched here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from support.gputrain_command import ROOT

TRAIN = """
import json, sys
sys.path.insert(0, "tests")
from pathlib import Path
from tempfile import TemporaryDirectory
import torch
import torch.distributed as dist
from support.runs.in_process import single_rank_trainer, train_in_process
from engine.config.run_sections import DeviceConfig
from engine.train.distributed.parallel import wrap_model
from engine.train.optim import lazy_dynamo
from engine.train.optim.lazy_dynamo import dynamo_stub

def steps_of_ddp():
    with single_rank_trainer() as trainer:
        wrapped = wrap_model(trainer.model.network, DeviceConfig(), torch.device("cpu"), 1, 2)
        assert type(wrapped).__name__ == "DistributedDataParallel"
        wrapped(torch.rand(2, 1, 8, 8)).sum().backward()
        trainer.model.optimizer.step()

def losses():
    with TemporaryDirectory() as folder:
        return [epoch.train_loss for epoch in train_in_process(Path(folder), "run.epochs=1")]

def has_compiler():
    return "torch._dynamo" in sys.modules
"""


def run_json(statements: str) -> Any:
    """Run `statements` in a new process and return its last output line, parsed as JSON."""
    command = [sys.executable, "-c", TRAIN + statements]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("torch_as_expected", [True, False])
def test_lazy_dynamo_imports_compiler_only_if_torch_differs(torch_as_expected: bool) -> None:
    differs = "" if torch_as_expected else "lazy_dynamo._reads = lambda *_: False\n"
    result = run_json(differs + "steps_of_ddp()\nprint(json.dumps([has_compiler(), losses()]))")
    assert result[0] is not torch_as_expected
    assert result[1] == run_json("print(json.dumps(losses()))"), "the losses differ"

"""Which GPUs a run gets, asked of a driver that answers at the level of its C library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Gputrain

from engine.gpus import Gpu, select, visible
from engine.problems import UsageError

FREE, BUSY, LIGHT = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"
GPUS = [
    Gpu(0, FREE, "Fake H100", 5 << 20, 80 << 30, ()),
    Gpu(1, BUSY, "Fake H100", 900 << 20, 80 << 30, (77,)),
    Gpu(2, LIGHT, "Fake H100", 1 << 20, 80 << 30, ()),
]


def chosen(selection: str) -> list[str]:
    return [gpu.uuid for gpu in select(selection, GPUS)]


@pytest.mark.parametrize(
    ("selection", "uuids"),
    [
        ("auto", [FREE, LIGHT]),
        ("all", [FREE, BUSY, LIGHT]),
        ("cpu", []),
        ("free:1", [LIGHT]),
        ("free:2", [FREE, LIGHT]),
        ("0,2", [FREE, LIGHT]),
        ("2, 1", [LIGHT, BUSY]),
        (BUSY, [BUSY]),
        ("GPU-a", [FREE]),
    ],
)
def test_a_selection_names_gpus(selection: str, uuids: list[str]) -> None:
    assert chosen(selection) == uuids


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("3", "there is no GPU '3'; there are 0 (Fake H100"),
        ("0,0", "GPU 0 is named twice"),
        ("0,GPU-aaaa", "GPU 0 is named twice"),
        ("GPU-bbbb", "'GPU-bbbb' could be several GPUs"),
        ("free:3", "3 free GPUs are wanted and 2 are free"),
        ("free:0", "train on the CPU with --gpus cpu"),
        ("gpu0", "there is no GPU 'gpu0'"),
    ],
)
def test_a_selection_that_names_none_is_refused_with_what_there_is(selection: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(selection)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, [FREE, BUSY, LIGHT]),
        ("", []),
        ("-1", []),
        ("2,0", [LIGHT, FREE]),
        (f"{BUSY},GPU-aaaa", [BUSY, FREE]),
        ("0,7,1", [FREE]),
    ],
)
def test_an_inherited_variable_narrows_the_choice(variable: str | None, uuids: list[str]) -> None:
    assert [gpu.uuid for gpu in visible(GPUS, variable)] == uuids


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 of ours."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_nvml.c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return folder


def ask(driver: Path, expression: str, gpus: str | None) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)} | ({"FAKE_GPUS": gpus} if gpus else {})
    program = f"from engine import gpus\nimport json\nprint(json.dumps({expression}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


def test_the_driver_is_read_in_pci_order(driver: Path) -> None:
    fields = "[[g.index, g.uuid, g.name, g.memory_used, g.memory_total, g.computing] for g in gpus.list_gpus()]"
    answer = json.loads(ask(driver, fields, f"{FREE}:5:0,{BUSY}:900:77"))
    assert answer == [
        [0, FREE, "Fake H100", 5 << 20, 80 << 30, []],
        [1, BUSY, "Fake H100", 900 << 20, 80 << 30, [77]],
    ]


def test_without_a_driver_auto_is_the_cpu(driver: Path) -> None:
    assert json.loads(ask(driver, "gpus.choose('auto')", None)) == []


def test_a_run_names_the_gpus_that_exist_where_one_does_not(driver: Path, gputrain: Gputrain) -> None:
    environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_GPUS": f"{FREE}:5:0", "CUDA_VISIBLE_DEVICES": "0"}
    done = gputrain("run", "--headless", "digits", "--gpus", "0,4", **environment)
    assert done.returncode == 2
    assert f"device.gpus: there is no GPU '4'; there are 0 (Fake H100, {FREE})" in done.stderr
    assert not gputrain.runs.exists()

"""NUMA nodes of GPUs, read from a fake sysfs, and what a rank is bound to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.distributed.node_plan import NodePlan, plan_node
from engine.gpus.numa import bind_to_node, numa_nodes
from engine.gpus.selection import CudaDevice

BUS_IDS = ("00000000:18:00.0", "00000000:3A:00.0", "00000000:9A:00.0", "00000000:AB:00.0")
GPUS = [CudaDevice(index, f"GPU-{index}", "H100", 0, pci_bus_id=bus_id) for index, bus_id in enumerate(BUS_IDS)]
TWO_NODES = {0: "0-15,32-47", 1: "16-31,48-63"}
GPU_NODES = (0, 0, 1, 1)


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("engine.gpus.numa.SYSFS", tmp_path)
    monkeypatch.setattr("engine.distributed.node_plan.available_cores", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return tmp_path


def make_host(
    sysfs: Path, nodes: Mapping[int, str], gpu_nodes: tuple[int, ...] = GPU_NODES, bus_ids: tuple[str, ...] = BUS_IDS
) -> None:
    for node, cpus in nodes.items():
        folder = sysfs / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for bus_id, node in zip(bus_ids, gpu_nodes, strict=True):
        folder = sysfs / "bus/pci/devices" / bus_id.lower().removeprefix("0000")
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


def plan(*overrides: str, gpus: list[CudaDevice] = GPUS, ranks: int | None = None) -> NodePlan:
    return plan_node(resolve_config("digits", overrides).config, gpus, ranks)


@pytest.mark.parametrize(
    ("nodes", "gpu_nodes"),
    [
        ({}, ()),
        ({0: "0-63"}, (0, 0, 0, 0)),
        # A node of memory only, such as that of a Grace Hopper GPU, has no CPUs.
        ({0: "0-63", 1: ""}, (0, 0, 0, 0)),
        (TWO_NODES, (-1, -1, -1, -1)),
        (TWO_NODES, ()),
        ({0: "0-59", 1: "60-63"}, GPU_NODES),
    ],
    ids=["no sysfs", "one node", "memory only", "unknown to the kernel", "no PCI devices", "too few CPUs"],
)
def test_host_without_a_choice_of_nodes_binds_nothing(
    sysfs: Path, nodes: dict[int, str], gpu_nodes: tuple[int, ...]
) -> None:
    make_host(sysfs, nodes, gpu_nodes, BUS_IDS[: len(gpu_nodes)])
    assert numa_nodes(BUS_IDS) == (None,) * 4
    assert numa_nodes([None]) == (None,)


@pytest.mark.parametrize(
    ("overrides", "gpus", "node", "cores", "line"),
    [
        ((), GPUS, 0, 16, "NUMA nodes 0, 1"),
        # Both GPUs are on one node, whose cores the ranks share.
        ((), GPUS[2:], 1, 16, "NUMA node 1"),
        (("device.numa=off",), GPUS[2:], None, 32, ""),
        (("device.parallel=dp",), GPUS, None, 64, ""),
        (("device.parallel=dp",), GPUS[2:], 1, 32, "NUMA node 1"),
    ],
)
def test_plan_gives_rank_its_share_of_its_node(
    sysfs: Path, overrides: tuple[str, ...], gpus: list[CudaDevice], node: int | None, cores: int, line: str
) -> None:
    make_host(sysfs, TWO_NODES)
    planned = plan(*overrides, gpus=gpus)
    assert (planned.numa_node(0), planned.cores_per_rank, planned.describe_numa()) == (node, cores, line)
    assert planned.threads_per_rank == cores


def test_plan_binds_rank_that_sees_only_its_own_gpu(sysfs: Path) -> None:
    make_host(sysfs, TWO_NODES)
    planned = plan(gpus=GPUS[3:], ranks=4)
    assert (planned.numa_node(3), planned.cores_per_rank) == (1, 16)


@pytest.fixture
def restored_affinity(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_bind_to_node_keeps_within_allowed_cpus(
    restored_affinity: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpus.numa.SYSFS", tmp_path)
    first = min(restored_affinity)
    make_host(tmp_path, {0: f"{first},4000-4010", 1: "4011"}, (), ())
    bind_to_node(0)
    assert os.sched_getaffinity(0) == {first}
    bind_to_node(1)
    assert os.sched_getaffinity(0) == {first}

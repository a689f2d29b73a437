"""The NUMA node of each GPU, and the binding of a rank to the CPUs of that node.

`engine.distributed.node_plan` asks for the nodes, `engine.training.train` binds the rank. `torch.numa` binds by private
functions that differ between the versions of torch, need the program numactl, and initialize CUDA to learn the PCI
address of the GPU, but a rank that has initialized CUDA must not fork its loader processes. NVML has told the address.

The files are those of Documentation/ABI/stable/sysfs-devices-node and sysfs-bus-pci of Linux.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SYSFS = Path("/sys")
# With fewer, loading batches slows a rank down more than local memory speeds it up.
MIN_BOUND_CPUS = 8


def numa_nodes(pci_bus_ids: Sequence[str | None], *, own_cores: bool = False) -> tuple[int | None, ...]:
    """Return the node to bind the rank of each GPU to; None for all on a host with one node, if the node of a GPU is
    unknown, or if a rank would lose CPUs and keep fewer than `MIN_BOUND_CPUS`. With `own_cores`, no other rank
    uses the CPUs of this process."""
    unbound: tuple[int | None, ...] = (None,) * len(pci_bus_ids)
    if len([path for path in SYSFS.glob("devices/system/node/node[0-9]*/cpulist") if path.read_text().strip()]) < 2:
        return unbound
    nodes = [_gpu_node(pci_bus_id) for pci_bus_id in pci_bus_ids]
    needed = min(len(os.sched_getaffinity(0)) // (1 if own_cores else max(len(nodes), 1)), MIN_BOUND_CPUS)
    for node, gpus in Counter(nodes).items():
        if node is None or len(allowed_cpus(node)) // (1 if own_cores else gpus) < needed:
            return unbound
    return tuple(nodes)


def _gpu_node(pci_bus_id: str | None) -> int | None:
    """Return the node of a GPU; None if it is unknown, which the kernel reports as -1."""
    if pci_bus_id is None:
        return None
    domain, _, rest = pci_bus_id.lower().partition(":")
    # NVML writes the domain with eight digits, the kernel with at least four.
    path = SYSFS / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def allowed_cpus(node: int) -> set[int]:
    """Return the CPUs of a node that this process may use."""
    cpus = set[int]()
    with suppress(OSError):
        text = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus & os.sched_getaffinity(0)


def bind_to_node(node: int) -> None:
    """Bind this thread, and the threads and processes that it starts from now on, to the CPUs of a node. The kernel
    then allocates their memory on that node, as long as it has free pages.

    Does nothing if this process may use none of them."""
    if cpus := allowed_cpus(node):
        os.sched_setaffinity(0, cpus)

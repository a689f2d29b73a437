"""What a run of a config would meet: its devices, what its loader processes and checkpoints need, and whether its ranks
reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import Config, as_dict
from engine.config.user_code import is_own
from engine.data.limits import SHARED_MEMORY, Loading, auto_workers, open_files, shared_memory, wants_workers
from engine.data.sources.builtin import IMAGE_SETS, check_image_set
from engine.data.sources.formats import likely_format
from engine.distributed.node_plan import plan
from engine.doctor.check import Check, short_of
from engine.gpus.selection import Device, NotFreeError, select, why_not_free
from engine.training.disk import checkpoint_bytes, checkpoint_files, disk_space
from engine.utils.errors import UsageError
from engine.utils.files import expand
from engine.utils.host import RANKS_PER_CORE, cores, free_bytes, in_bytes, most_open_files
from engine.utils.text import counted

# Classes where the data says how many, and nothing has been opened: those of ImageNet.
LIKELY_CLASSES = 1000
# Less than PCIe's slowest way round through host memory.
SLOW_GPU_BYTES_PER_SECOND = 2e9
OTHERS_ADVICE = "name others with --gpus, or wait for them with --wait"
FAR_ADVICE = (
    "NCCL_DEBUG=INFO says where it stands; where GPUs cannot reach each other NCCL_P2P_DISABLE=1 helps (then look at "
    "IOMMU and ACS in the BIOS); `nvidia-smi topo -m` shows how they are joined"
)


def device_check(config: Config, devices: Sequence[Device]) -> tuple[Check, list[Device]]:
    """What `device.gpus` comes to among the devices that CUDA would show; none for the CPU."""
    selection, name = config.device.gpus, "devices"
    try:
        chosen = select(selection, devices)
        ranks = plan(config, chosen).ranks
    except UsageError as error:
        problem = error.problems[0]
        advice = OTHERS_ADVICE if isinstance(error, NotFreeError) else problem.advice
        return Check("run", name, "problem", problem.reason, advice), []
    if not chosen and devices and selection == "auto":
        found = f"no GPU is free, so a run trains on the CPU ({why_not_free(devices)})"
        return Check("run", name, "warning", found, "name some with --gpus, or wait for one with --wait"), []
    if not chosen:
        return Check("run", name, "ok", f"{counted(ranks, 'rank')} on the CPU"), []
    found = f"{selection} comes to GPU {', '.join(str(device.index) for device in chosen)}"
    if shared := why_not_free(chosen):
        return Check("run", name, "warning", f"{found}, shared with others: {shared}", OTHERS_ADVICE), chosen
    return Check("run", name, "ok", found), chosen


def data_check(config: Config) -> Check | None:
    """Whether the data is where the config says; None where it needs no place. What is in a folder of images, and what
    comes of the user's own code, is left to `gputrain run --dry-run`, which looks at it."""
    data = config.data
    if data.path is None:
        return None
    where, name = expand(data.path), "data"
    if data.dataset in IMAGE_SETS:
        try:
            check_image_set(data)
        except UsageError as error:
            return Check("run", name, "problem", error.problems[0].reason, error.problems[0].advice)
    elif is_own(data.dataset):
        if not where.exists():
            return Check("run", name, "problem", f"{data.path} does not exist", "give the path of the data")
    elif not where.is_dir():
        found = f"{data.path} does not exist or is no folder"
        return Check("run", name, "problem", found, "give the folder of the data")
    return Check("run", name, "ok", f"{data.dataset} in {data.path}")


def loading_checks(config: Config, ranks: int) -> Iterator[Check]:
    """Shared memory and open files of so many ranks on this host."""
    workers = expected_workers(config, ranks)
    loading = Loading.of(config, ranks, workers, likely_format(config))
    limit, free = most_open_files(), None
    try:
        free = free_bytes(SHARED_MEMORY)
    except OSError as error:
        found = f"{SHARED_MEMORY} cannot be looked at: {error.strerror}"
        yield Check("run", "shared memory", "unknown", found, "see that it is mounted, as a tmpfs")
    if free is not None:
        users = f", for {counted(workers, 'worker')} a rank" if workers else ""
        enough = f"{SHARED_MEMORY} has {in_bytes(free)} free{users}"
        yield short_of("run", "shared memory", shared_memory(loading, free), enough)
    most = "any number of files" if limit is None else counted(limit, "file")
    yield short_of("run", "open files", open_files(loading, limit), f"a process may have {most} open")


def expected_workers(config: Config, ranks: int) -> int:
    """As far as that can be told without a look at the data: a folder may turn out to fit into memory."""
    data, read = config.data, config.data.dataset == "folder" or is_own(config.data.dataset)
    wanted = wants_workers(config, in_memory=not read)
    if data.pipeline in ("memory", "fixed") or (data.pipeline == "auto" and not wanted):
        return 0
    if data.workers != "auto":
        return data.workers
    return auto_workers(ranks, data.batch) if wanted else 0


def expected_model(config: Config) -> dict[str, Any]:
    """What the probe must know to tell the size of a model."""
    images = likely_format(config)
    ten = config.data.dataset not in ("folder", "cifar100") and not is_own(config.data.dataset)
    known = config.data.num_classes or (10 if ten else LIKELY_CLASSES)
    return {"config": as_dict(config), "channels": images.channels, "classes": known, "size": images.size}


def checkpoint_check(config: Config, root: Path, weights: int) -> Check:
    """Whether the checkpoints of one run with so many bytes of weights fit below `root`."""
    size, files = checkpoint_bytes(weights, config.optim), checkpoint_files(config)
    try:
        free = free_bytes(root)
    except OSError as error:
        return Check("run", "checkpoints", "unknown", f"{root}: {error.strerror}", "give another --runs-dir")
    enough = f"up to {files} of about {in_bytes(size)} a run, {in_bytes(free)} free"
    return short_of("run", "checkpoints", disk_space(root, free, size, files), enough)


def reduce_devices(config: Config, chosen: Sequence[Device]) -> list[str]:
    """Between what an all-reduce is tried: the chosen GPUs, else so many ranks on the CPU, at least two."""
    most = RANKS_PER_CORE * cores()
    return [device.uuid for device in chosen] or ["cpu"] * max(min(config.device.ranks, most), 2)


def reduce_check(devices: Sequence[str], outcome: Mapping[str, Any]) -> Check:
    """What came of it."""
    on_gpu, number, name = devices[0] != "cpu", len(devices), "all-reduce"
    among = counted(number, "GPU") if on_gpu else f"{number} ranks on the CPU"
    backend = "NCCL" if on_gpu else "gloo"
    advice = FAR_ADVICE if on_gpu else "look whether a firewall or GLOO_SOCKET_IFNAME keeps them from the interface lo"
    if "error" in outcome:
        return Check("run", name, "problem", f"{backend} between {among} failed: {outcome['error']}", advice)
    if not outcome["right"]:
        return Check("run", name, "problem", f"{backend} between {among} gave a wrong sum", advice)
    if number == 1:
        return Check("run", name, "ok", "one GPU: there is nothing to reduce, and it computes")
    bandwidth = bus_bandwidth(number, outcome["bytes"], outcome["seconds"])
    found = f"{in_bytes(outcome['bytes'])} between {among} with {backend}: {bandwidth / 1e9:.3g} GB/s on the bus"
    if on_gpu and bandwidth < SLOW_GPU_BYTES_PER_SECOND:
        return Check("run", name, "warning", f"{found}, which is slow", advice)
    return Check("run", name, "ok", found)


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """As nccl-tests defines it, so that it does not depend on the number of ranks: what the slowest link carried."""
    return 2 * (ranks - 1) / ranks * size / seconds

"""What a run of a config would meet: its devices, what its loader processes and checkpoints need, and whether its ranks
reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import Config, as_dict
from engine.config.user_code import is_user_code
from engine.data.limits import SHM_PATH, LoaderFootprint, auto_workers, needs_workers, open_files_shortage, shm_shortage
from engine.data.sources.builtin import TORCHVISION_DATASETS, check_torchvision_files
from engine.data.sources.formats import expected_input_format
from engine.distributed.node_plan import plan_node
from engine.doctor.check import Check, shortage_check
from engine.gpus.selection import CudaDevice, NotFreeError, select, why_not_free
from engine.training.disk import checkpoint_bytes, disk_shortage, max_new_checkpoints
from engine.utils.errors import UsageError
from engine.utils.files import expand_user
from engine.utils.host import MAX_RANKS_PER_CORE, available_cores, format_bytes, free_bytes, max_open_files
from engine.utils.text import pluralize

# Classes where the data says how many, and nothing has been opened: those of ImageNet.
DEFAULT_NUM_CLASSES = 1000
# Less than PCIe's slowest way round through host memory.
MIN_GPU_BUS_BYTES_PER_SECOND = 2e9
BUSY_GPUS_ADVICE = "name others with --gpus, or wait for them with --wait"
NCCL_ADVICE = (
    "NCCL_DEBUG=INFO says where it stands; where GPUs cannot reach each other NCCL_P2P_DISABLE=1 helps (then look at "
    "IOMMU and ACS in the BIOS); `nvidia-smi topo -m` shows how they are joined"
)


def device_check(config: Config, devices: Sequence[CudaDevice]) -> tuple[Check, list[CudaDevice]]:
    """What `device.gpus` comes to among the devices that CUDA would show; none for the CPU."""
    selection, name = config.device.gpus, "devices"
    try:
        chosen = select(selection, devices)
        ranks = plan_node(config, chosen).local_world_size
    except UsageError as error:
        problem = error.problems[0]
        advice = BUSY_GPUS_ADVICE if isinstance(error, NotFreeError) else problem.advice
        return Check("run", name, "problem", problem.reason, advice), []
    if not chosen and devices and selection == "auto":
        found = f"no GPU is free, so a run trains on the CPU ({why_not_free(devices)})"
        return Check("run", name, "warning", found, "name some with --gpus, or wait for one with --wait"), []
    if not chosen:
        return Check("run", name, "ok", f"{pluralize(ranks, 'rank')} on the CPU"), []
    found = f"{selection} comes to GPU {', '.join(str(device.index) for device in chosen)}"
    if shared := why_not_free(chosen):
        return Check("run", name, "warning", f"{found}, shared with others: {shared}", BUSY_GPUS_ADVICE), chosen
    return Check("run", name, "ok", found), chosen


def data_check(config: Config) -> Check | None:
    """Whether the data is where the config says; None where it needs no place. What is in a folder of images, and what
    comes of the user's own code, is left to `gputrain run --dry-run`, which looks at it."""
    data = config.data
    if data.path is None:
        return None
    where, name = expand_user(data.path), "data"
    if data.dataset in TORCHVISION_DATASETS:
        try:
            check_torchvision_files(data)
        except UsageError as error:
            return Check("run", name, "problem", error.problems[0].reason, error.problems[0].advice)
    elif is_user_code(data.dataset):
        if not where.exists():
            return Check("run", name, "problem", f"{data.path} does not exist", "give the path of the data")
    elif not where.is_dir():
        found = f"{data.path} does not exist or is no folder"
        return Check("run", name, "problem", found, "give the folder of the data")
    return Check("run", name, "ok", f"{data.dataset} in {data.path}")


def loading_checks(config: Config, ranks: int) -> Iterator[Check]:
    """Shared memory and open files of so many ranks on this host."""
    workers = expected_num_workers(config, ranks)
    loading = LoaderFootprint.from_config(config, ranks, workers, expected_input_format(config))
    limit, free = max_open_files(), None
    try:
        free = free_bytes(SHM_PATH)
    except OSError as error:
        found = f"{SHM_PATH} cannot be looked at: {error.strerror}"
        yield Check("run", "shared memory", "unknown", found, "see that it is mounted, as a tmpfs")
    if free is not None:
        users = f", for {pluralize(workers, 'worker')} a rank" if workers else ""
        enough = f"{SHM_PATH} has {format_bytes(free)} free{users}"
        yield shortage_check("run", "shared memory", shm_shortage(loading, free), enough)
    most = "any number of files" if limit is None else pluralize(limit, "file")
    yield shortage_check("run", "open files", open_files_shortage(loading, limit), f"a process may have {most} open")


def expected_num_workers(config: Config, ranks: int) -> int:
    """As far as that can be told without a look at the data: a folder may turn out to fit into memory."""
    data, read = config.data, config.data.dataset == "folder" or is_user_code(config.data.dataset)
    wanted = needs_workers(config, in_memory=not read)
    if data.pipeline in ("memory", "fixed") or (data.pipeline == "auto" and not wanted):
        return 0
    if data.workers != "auto":
        return data.workers
    return auto_workers(ranks, data.numeric_batch_size) if wanted else 0


def probe_model_spec(config: Config) -> dict[str, Any]:
    """What the probe must know to tell the size of a model."""
    images = expected_input_format(config)
    ten = config.data.dataset not in ("folder", "cifar100") and not is_user_code(config.data.dataset)
    known = config.data.num_classes or (10 if ten else DEFAULT_NUM_CLASSES)
    return {"config": as_dict(config), "channels": images.channels, "classes": known, "size": images.size}


def checkpoint_check(config: Config, root: Path, weight_bytes: int) -> Check:
    """Whether the checkpoints of one run with so many bytes of weights fit below `root`."""
    size, files = checkpoint_bytes(weight_bytes, config.optim), max_new_checkpoints(config)
    try:
        free = free_bytes(root)
    except OSError as error:
        return Check("run", "checkpoints", "unknown", f"{root}: {error.strerror}", "give another --runs-dir")
    enough = f"up to {files} of about {format_bytes(size)} a run, {format_bytes(free)} free"
    return shortage_check("run", "checkpoints", disk_shortage(root, free, size, files), enough)


def all_reduce_devices(config: Config, chosen: Sequence[CudaDevice]) -> list[str]:
    """Between what an all-reduce is tried: the chosen GPUs, else so many ranks on the CPU, at least two."""
    most = MAX_RANKS_PER_CORE * available_cores()
    return [device.uuid for device in chosen] or ["cpu"] * max(min(config.device.ranks, most), 2)


def all_reduce_check(devices: Sequence[str], outcome: Mapping[str, Any]) -> Check:
    """What came of it."""
    on_gpu, number, name = devices[0] != "cpu", len(devices), "all-reduce"
    among = pluralize(number, "GPU") if on_gpu else f"{number} ranks on the CPU"
    backend = "NCCL" if on_gpu else "gloo"
    advice = NCCL_ADVICE if on_gpu else "look whether a firewall or GLOO_SOCKET_IFNAME keeps them from the interface lo"
    if "error" in outcome:
        return Check("run", name, "problem", f"{backend} between {among} failed: {outcome['error']}", advice)
    if not outcome["right"]:
        return Check("run", name, "problem", f"{backend} between {among} gave a wrong sum", advice)
    if number == 1:
        return Check("run", name, "ok", "one GPU: there is nothing to reduce, and it computes")
    bandwidth = bus_bandwidth(number, outcome["bytes"], outcome["seconds"])
    found = f"{format_bytes(outcome['bytes'])} between {among} with {backend}: {bandwidth / 1e9:.3g} GB/s on the bus"
    if on_gpu and bandwidth < MIN_GPU_BUS_BYTES_PER_SECOND:
        return Check("run", name, "warning", f"{found}, which is slow", advice)
    return Check("run", name, "ok", found)


def bus_bandwidth(ranks: int, size_bytes: int, seconds: float) -> float:
    """As nccl-tests defines it, so that it does not depend on the number of ranks: what the slowest link carried."""
    return 2 * (ranks - 1) / ranks * size_bytes / seconds

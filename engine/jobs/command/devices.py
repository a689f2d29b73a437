"""The reserved GPUs in the environment of a command (`CUDA_VISIBLE_DEVICES`), and the check that it uses no others.

The devices come from `engine.gpus.allocation`, the processes on them from a snapshot of all GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import Problem
from engine.gpus.selection import CudaDevice
from engine.gpus.snapshot import Snapshot
from engine.gpus.visible_devices import show_devices

# `${run}` is a variable of a shell, and `{{run}}` belongs to a template.
_PLACEHOLDER = re.compile(r"(?<![${])\{([A-Za-z_][\w.-]*)\}")
JOB_PLACEHOLDERS = ("nodes", "head", "port")
"""Those of a job of several nodes, whose script sets variables such as `GPUTRAIN_HEAD`."""
PLACEHOLDERS = ("gpus", "ids", "uuids", "run", "folder", *JOB_PLACEHOLDERS)
"""The names that `expand` replaces."""


@dataclass(frozen=True)
class DeviceNames:
    """Names of the reserved GPUs: `ids` for `CUDA_VISIBLE_DEVICES`, and full UUIDs. Both are empty on the CPU."""

    ids: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()


def name_devices(devices: Sequence[CudaDevice], snapshot: Snapshot | None) -> DeviceNames:
    """Return how a command that starts now names the devices.

    CUDA's numbers in PCI bus order, which every program accepts; UUIDs break vLLM (vllm#13815) and DeepSpeed
    (DeepSpeed#5278). A MIG instance has no number. They are UUIDs too if the number is not certain.
    """
    uuids = tuple(device.uuid for device in devices)
    places = {gpu.uuid: place for place, gpu in enumerate(snapshot.gpus if snapshot is not None else ())}
    if not set(uuids) <= places.keys() or any(device.mig_ids is not None for device in devices):
        return DeviceNames(uuids, uuids)
    before = snapshot.gpus[: max((places[uuid] for uuid in uuids), default=0)] if snapshot is not None else ()
    # NVML also counts GPUs that are lost, and CUDA has its own rules for those in MIG mode.
    if any(gpu.uuid is None or gpu.state == "lost" or gpu.mig_enabled for gpu in before):
        return DeviceNames(uuids, uuids)
    return DeviceNames(tuple(str(places[uuid]) for uuid in uuids), uuids)


def device_environment(names: DeviceNames) -> dict[str, str]:
    """Return the variables that make these GPUs, or none, the only ones that a command sees."""
    found = dict[str, str]()
    show_devices(names.ids, found)
    return found


def has_placeholder(word: str) -> bool:
    """Whether `expand` replaces a part of a word."""
    return _PLACEHOLDER.search(word) is not None


def expand(words: Sequence[str], names: DeviceNames, run: str, folder: Path) -> list[str]:
    """Return words with `{gpus}` (a number), `{ids}`, `{uuids}`, `{run}` and `{folder}` replaced.

    In a job of a batch system also `{nodes}` (a number), `{head}`, the first node, and `{port}`."""
    found = {name: os.environ.get(f"GPUTRAIN_{name.upper()}", "") for name in JOB_PLACEHOLDERS}
    values = {name: value for name, value in found.items() if value} | {
        "gpus": str(len(names.uuids)),
        "ids": ",".join(names.ids),
        "uuids": ",".join(names.uuids),
        "run": run,
        "folder": str(folder),
    }
    return fill(words, values)


def fill(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return words with `{name}` replaced by its value, for each name in `values`.

    Other text in braces, such as JSON, stays as it is.
    """
    return [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in words]


def find_placeholders(words: Iterable[str]) -> list[str]:
    """Return the names in `{name}`, each once."""
    return list(dict.fromkeys(match[1] for word in words for match in _PLACEHOLDER.finditer(word)))


def misplaced_use(snapshot: Snapshot, members: Collection[int], reserved: Collection[str], run: str) -> Problem | None:
    """Return that processes of a run (`members`) compute on GPUs that it has not reserved; None if
    they do not. `reserved` are the UUIDs of its GPUs and MIG instances."""
    own = {gpu.index for gpu in snapshot.gpus if {gpu.uuid, *(each.uuid for each in gpu.instances)} & {*reserved}}
    used = [
        str(gpu.index)
        for gpu in snapshot.gpus
        if gpu.index not in own
        and any(each.kind == "compute" and each.pid in members for each in gpu.processes.value or ())
    ]
    if not used:
        return None
    reason = f"run {run} computes on GPU {','.join(used)}, reserved {','.join(map(str, sorted(own))) or 'none'}"
    advice = "let the command use the GPUs in CUDA_VISIBLE_DEVICES"
    return Problem("", reason, advice, code="gpu-not-reserved")

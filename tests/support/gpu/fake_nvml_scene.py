"""Scene file of fake_nvml.py, in the format that fake_nvml_scene.h documents, and the prologue of every call."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 1, 2, 3, 4, 6, 7
DRIVER_NOT_LOADED, GPU_IS_LOST, ARGUMENT_VERSION_MISMATCH = 9, 15, 25
NOTHING = 0xFFFFFFFF

GPU_DEFAULTS: dict[str, str | float] = {
    "name": "Fake_H100_80GB", "total": 81559, "used": 500, "reserved": 600, "util": 0, "memory_util": 0,
    "temperature": 40, "power": 100, "limit": 700, "sm_clock": 1200, "memory_clock": 2600, "max_sm_clock": 1980,
    "max_memory_clock": 2619, "fan": -1, "pstate": 0, "throttle": 0, "ecc": 1, "corrected": 0, "uncorrected": 0,
    "pcie_gen": 5, "pcie_width": 16, "replays": 0, "tx": 1000, "rx": 2000, "nvlinks": 18, "nvlink_tx": 3000,
    "nvlink_rx": 4000, "memory_temperature": 45, "mig": 0, "privileged": 1, "display": 0, "capability": 80, "gpm": 1,
    "sm": 0, "tensor": 0, "dram": 0, "sampling": 0,
}  # fmt: skip
INSTANCE_DEFAULTS: dict[str, str | float] = {
    "name": "Fake_MIG_1g.10gb", "gi": 1, "ci": 0, "total": 9728, "used": 20, "reserved": 0,
    "sm": 0, "tensor": 0, "dram": 0,
}  # fmt: skip
SPARED = {  # not affected by a fault of `*`
    "nvmlInitWithFlags", "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString", "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3",
}  # fmt: skip

Device = SimpleNamespace  # a GPU or MIG instance: `uuid`, `bus`, `index` of the GPU, and the keys above


@dataclass
class Process:
    gpu: int
    pid: int
    used: float
    kind: str
    gi: int = NOTHING
    ci: int = 0
    sm: float = 0.0


@dataclass
class Fault:
    gpu: int | None
    function: str
    answer: str


@dataclass
class Scene:
    driver: str = "580.95.05"
    cuda: int = 13000
    gpus: list[Device] = field(default_factory=list)
    instances: list[Device] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def read(self, line: str) -> None:
        kind, *words = line.split()
        match kind, words:
            case "driver", [version]:
                self.driver = version
            case "cuda", [number]:
                self.cuda = int(number)
            case "gpu", pairs:
                self.gpus.append(device(len(self.gpus), GPU_DEFAULTS, pairs))
            case "instance", [gpu, *pairs]:
                self.instances.append(device(int(gpu), INSTANCE_DEFAULTS, pairs))
            case "process", [gpu, pid, used, "compute" | "graphics" | "mps" as kind, *instance]:
                self.processes.append(Process(int(gpu), int(pid), float(used), kind, *map(int, instance)))
            case "busy", [pid, sm]:
                for process in self.processes:
                    process.sm = float(sm) if process.pid == int(pid) else process.sm
            case "fault", [gpu, function, answer] if answer == "hang" or answer.removeprefix("slow=").isdigit():
                self.faults.append(Fault(None if gpu == "*" else int(gpu), function, answer))
            case _:
                raise ValueError(line)


def device(index: int, defaults: dict[str, str | float], pairs: list[str]) -> Device:
    values = {**defaults, "uuid": "", "bus": f"00000000:{(index + 1) * 0x10 & 0xFF:02X}:00.0"}
    for pair in pairs:
        key, _, value = pair.partition("=")
        is_text = isinstance(values[key], str)
        values[key] = value if is_text else int(value, 16) if value.startswith("0x") else float(value)
    if not values["uuid"]:
        raise ValueError("no uuid")
    return Device(**values | {"name": str(values["name"]).replace("_", " ")}, index=index)


class Answer(Exception):  # noqa: N818 - ends a call with a return code
    def __init__(self, code: int) -> None:
        self.code = code


def need(condition: object, code: int = NOT_SUPPORTED) -> None:
    if not condition:
        raise Answer(code)


class Host:
    """State of the library between calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scene: Scene | None = None
        self.seen: tuple[int, int, int] | None = None
        self.users = 0
        self.memory = (ctypes.c_char * 256)()  # a handle is the address of one element
        self.uuids: list[str] = []  # the UUID for each handle
        self.samples: dict[int, tuple[ctypes.c_char, int, int]] = {}  # address -> sample, device handle, GPU instance

    def load(self) -> bool:
        """Reload `scene` if the file changed. Return whether the file exists; `scene` keeps the last content."""
        with self.lock:
            try:
                with open(os.environ["FAKE_NVML"]) as file:  # noqa: PTH123 - cheapest, for every call
                    status = os.fstat(file.fileno())
                    seen = (status.st_ino, status.st_mtime_ns, status.st_size)
                    text = None if seen == self.seen else file.read()
            except (KeyError, OSError):
                return False
            if text is not None:
                scene = Scene()
                for raw_line in text.splitlines():
                    line = raw_line.partition("#")[0]
                    try:
                        if line.strip():
                            scene.read(line)
                    except (KeyError, TypeError, ValueError):
                        print("fake_nvml: cannot read this line of $FAKE_NVML:", line, file=sys.stderr, flush=True)
                        os.abort()
                self.scene, self.seen = scene, seen
            return True

    def handle(self, device: Device) -> int:
        with self.lock:
            if device.uuid not in self.uuids:
                self.uuids.append(device.uuid)
            return ctypes.addressof(self.memory) + self.uuids.index(device.uuid)

    def uuid(self, handle: int | None) -> str:
        offset = (handle or 0) - ctypes.addressof(self.memory)
        need(0 <= offset < len(self.uuids), INVALID_ARGUMENT)
        return self.uuids[offset]


HOST = Host()


@dataclass
class Call:
    scene: Scene
    gpu: Device
    mig: Device | None = None

    @property
    def either(self) -> Device:
        return self.mig or self.gpu


def enter(name: str, kind: str, first: Any) -> Call:
    """Prologue of every call: load the scene, resolve the device, apply a matching fault."""
    waited = False
    while True:
        readable = HOST.load()
        if name.startswith("nvmlInit"):
            need(readable, DRIVER_NOT_LOADED)
        need(name.startswith("nvmlInit") or HOST.users, UNINITIALIZED)
        scene = HOST.scene or Scene()
        call = Call(scene, Device(index=first if kind == "index" else None))
        if kind in ("gpu", "device"):
            uuid = HOST.uuid(first)
            call.mig = next((mig for mig in scene.instances if mig.uuid == uuid), None)
            index = call.mig.index if call.mig else next((gpu.index for gpu in scene.gpus if gpu.uuid == uuid), 999)
            need(index < len(scene.gpus), GPU_IS_LOST)
            call.gpu = scene.gpus[index]
        functions = (name,) if name in SPARED else (name, "*")
        for fault in scene.faults:
            if fault.gpu in (None, call.gpu.index) and fault.function in functions:
                break
        else:
            break
        if waited:
            break
        if fault.answer != "hang" and not fault.answer.startswith("slow="):
            need(fault.answer == "0", int(fault.answer))
            break
        waited = fault.answer != "hang"
        time.sleep(int(fault.answer.removeprefix("slow=")) / 1000 if waited else 0.02)
    need(kind != "gpu" or not call.mig)
    return call

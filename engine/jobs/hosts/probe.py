"""Print the GPUs of this host and who holds them as `gputrain gpus --watch --json` does, for hosts without gputrain.

`engine.jobs.hosts.watch` sends this file to `python3 -` on such a host, and `engine.jobs.hosts.reading` parses the
lines. It needs nvidia-smi, and of Python the standard library of 3.6. It ends when nobody reads its output any more.
"""

import ctypes
import json
import os
import pwd
import select
import signal
import subprocess
import time
from typing import Any, Dict, List, Tuple

LOOP_SECONDS = 5
# Fields of nvidia-smi: the reading of gputrain, its unit, and for a number what makes it one of that unit.
GPU_FIELDS: Dict[str, Tuple[str, str, Any]] = {
    "index": ("index", "", 1),
    "uuid": ("uuid", "", None),
    "name": ("name", "", None),
    "pci.bus_id": ("pci_bus_id", "", None),
    "utilization.gpu": ("util", "%", 1),
    "memory.used": ("memory_used", "B", 1 << 20),
    "memory.total": ("memory_total", "B", 1 << 20),
    "temperature.gpu": ("temperature", "\u00b0C", 1),
    "power.draw": ("power", "W", 1.0),
    "enforced.power.limit": ("power_limit", "W", 1.0),
    "mig.mode.current": ("mig", "", None),
    "driver_version": ("driver", "", None),
}
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
MIG_MODES = {"Enabled": "on", "Disabled": "off"}
SILENCE_SECONDS = 0.3  # after the last line of a sample
RESTART_SECONDS = 30  # before an nvidia-smi that ended is started again
MAX_COMMAND_BYTES = 300
PR_SET_PDEATHSIG = 1


class Probe:
    """The last lines of nvidia-smi, which runs in a loop: a start takes a second on a host with eight GPUs."""

    def __init__(self) -> None:
        self.gpus: Dict[int, List[str]] = {}  # fields by index
        self.processes: Dict[Tuple[str, str], Tuple[str, float]] = {}  # memory and arrival, by the GPU and the PID
        self.error = ""
        self.answered_at = self.started_at = time.monotonic()
        # The C library flushes each line to a terminal only.
        self.reader, self.writer = os.openpty()
        self.children: List[Any] = []
        self.partial = b""

    def start(self) -> None:
        self.started_at = time.monotonic()
        prctl = ctypes.CDLL(None).prctl
        for query, fields in (("gpu", GPU_FIELDS), ("compute-apps", PROCESS_FIELDS)):
            option = "--query-{}={}".format(query, ",".join(fields))
            command = ["nvidia-smi", option, "--format=csv,noheader,nounits", "--loop={}".format(LOOP_SECONDS)]
            try:
                child = subprocess.Popen(  # noqa: S603 (a fixed command)
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self.writer,
                    stderr=self.writer,
                    preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
                )
            except OSError as error:
                self.error = "nvidia-smi cannot be started: {}".format(error.strerror)
                return
            self.children.append(child)

    def restart_if_ended(self) -> None:
        is_ended = any(child.poll() is not None for child in self.children) or not self.children
        if is_ended and time.monotonic() - self.started_at > RESTART_SECONDS:
            self.end()
            self.gpus.clear()
            self.start()

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        self.children = []

    def read(self) -> None:
        lines = (self.partial + os.read(self.reader, 65536)).split(b"\n")
        self.partial = lines.pop()
        for line in lines:
            text = line.decode("utf-8", "replace").strip()
            fields = [field.strip() for field in text.split(",")]
            if len(fields) == len(GPU_FIELDS) and fields[0].isdecimal():
                self.gpus[int(fields[0])] = [MIG_MODES.get(field, field) for field in fields]
                self.answered_at, self.error = time.monotonic(), ""
            elif len(fields) == len(PROCESS_FIELDS) and fields[1].isdecimal():
                self.processes[fields[0], fields[1]] = fields[2], time.monotonic()
            elif text:
                self.error = text

    def sample(self) -> str:
        now, age = time.monotonic(), round(time.monotonic() - self.answered_at, 1)
        self.processes = {key: seen for key, seen in self.processes.items() if now - seen[1] < 1.5 * LOOP_SECONDS}
        gpus, driver = [], reading("", reason="not requested")
        for _, texts in sorted(self.gpus.items()):
            fields = {name: reading(text, *how) for (name, *how), text in zip(GPU_FIELDS.values(), texts)}  # noqa: B905
            index, uuid, driver = fields.pop("index")["value"], fields.pop("uuid")["value"], fields.pop("driver")
            held = [process(pid, memory) for (gpu, pid), (memory, _) in self.processes.items() if gpu == uuid]
            gpu = {"index": index, "uuid": uuid, "state": "ok", "age": age, "time": driver["time"]}
            gpus.append(dict(gpu, processes=reading(held), **fields))
        values: Dict[str, Any] = {"probe": 1, "time": time.time(), "host": os.uname().nodename, "gpus": gpus}
        values.update(
            source={"kind": "driver", "made_up": False}, driver=driver, cuda=reading("", reason="not requested")
        )
        return json.dumps(dict(values, error=None if gpus else self.error or None), separators=(",", ":"))


def reading(value: Any, unit: str = "", scale: Any = None, reason: Any = None) -> Dict[str, Any]:
    """Return a reading of nvidia-smi as gputrain stores it: its value, or why there is none, such as `[N/A]`."""
    if isinstance(value, str) and (not value or value.startswith("[")):
        value, reason = None, reason or value.strip("[]") or "unknown"
    elif scale is not None:
        value = type(scale)(float(value)) * scale
    return {"value": value, "time": round(time.time(), 3), "reason": reason, "unit": unit}


def process(pid: str, memory: str) -> Dict[str, Any]:
    """Return a process; its user and command are unknown if it is not in this /proc, as in a container."""
    user = command = ""
    try:
        uid = os.stat("/proc/" + pid).st_uid
        user = "uid {}".format(uid)
        with open("/proc/{}/cmdline".format(pid), "rb") as file:
            command = file.read(MAX_COMMAND_BYTES).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        user = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        pass
    missing = reading("", reason="not requested")
    values = {"pid": int(pid), "kind": "compute", "instance": None, "cpu": missing, "memory": missing}
    return dict(values, user=reading(user), command=reading(command), gpu_memory=reading(memory, "B", 1 << 20))


def main() -> None:
    probe, poll = Probe(), select.poll()
    probe.start()
    poll.register(probe.reader, select.POLLIN)
    # Reports only that the reader is gone.
    poll.register(1, 0)
    has_news = bool(probe.error)
    try:
        while True:
            events = dict(poll.poll(1000 * (SILENCE_SECONDS if has_news else LOOP_SECONDS)))
            if 1 in events:
                return
            has_news = bool(events)
            if events:
                probe.read()
                continue
            print(probe.sample(), flush=True)
            probe.restart_if_ended()
    except BrokenPipeError:
        pass
    finally:
        probe.end()


if __name__ == "__main__":
    main()

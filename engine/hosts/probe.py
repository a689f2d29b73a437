"""Print the GPUs of this host and who holds them, a line of JSON per sample: for hosts without gputrain.

`engine.hosts.watch` sends this file to `python3 -` on such a host, and `engine.hosts.reading` parses the lines. It
needs nvidia-smi, and of Python the standard library of 3.6. It ends when nobody reads its output any more.
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
GPU_FIELDS = (
    *("index", "uuid", "name", "pci.bus_id", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu"),
    *("power.draw", "enforced.power.limit", "mig.mode.current", "driver_version"),
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
SILENCE_SECONDS = 0.3  # after the last line of a sample
RESTART_SECONDS = 30  # before an nvidia-smi that ended is started again
MAX_COMMAND_BYTES = 300
PR_SET_PDEATHSIG = 1


class Probe:
    """The last lines of nvidia-smi, which runs in a loop: a start takes a second on a host with eight GPUs."""

    def __init__(self) -> None:
        self.gpus: Dict[str, List[str]] = {}  # fields by index
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
            if len(fields) == len(GPU_FIELDS) and fields[0].isdigit():
                self.gpus[fields[0]] = fields
                self.answered_at, self.error = time.monotonic(), ""
            elif len(fields) == len(PROCESS_FIELDS) and fields[1].isdigit():
                self.processes[fields[0], fields[1]] = fields[2], time.monotonic()
            elif text:
                self.error = text

    def sample(self) -> str:
        now = time.monotonic()
        self.processes = {key: seen for key, seen in self.processes.items() if now - seen[1] < 1.5 * LOOP_SECONDS}
        processes = [
            dict(describe(pid), gpu=gpu, pid=pid, memory=memory) for (gpu, pid), (memory, _) in self.processes.items()
        ]
        values: Dict[str, Any] = {
            "host": os.uname().nodename,
            "age": round(now - self.answered_at, 1),
            "error": self.error,
        }
        values.update(gpus=list(self.gpus.values()), processes=processes)
        return json.dumps(dict(values, probe=1), separators=(",", ":"))


def describe(pid: str) -> Dict[str, str]:
    """Return the user and the command of a process; empty if it is not in this /proc, as in a container."""
    try:
        uid = os.stat("/proc/" + pid).st_uid
        with open("/proc/{}/cmdline".format(pid), "rb") as file:
            command = file.read(MAX_COMMAND_BYTES).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return {"user": "", "command": ""}
    try:
        return {"user": pwd.getpwuid(uid).pw_name, "command": command}
    except KeyError:
        return {"user": "uid {}".format(uid), "command": command}


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

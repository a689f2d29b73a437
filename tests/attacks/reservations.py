"""A second user plants entries in the shared folder of GPU reservations. The victim must get the GPUs nevertheless.

Only a claim of the attacker's own may make GPUs look busy. Then the victim must be told before it trains on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from attack import Stage, perform

sys.path.append(str(Path(__file__).parent.parent))

from support.gpu.fake_gpu_host import FakeGpuHost, build_fake_driver, gpu_line, gpu_uuid, parse_gpus_json

GPUS = [gpu_uuid(0), gpu_uuid(1)]
# Defines what the programs below use, and keeps the locks until it is killed. Prints the PID that holds them.
PLANT = """
import fcntl, json, os, signal, struct, sys, time
from pathlib import Path
victim, own, gpus = f"gputrain-{sys.argv[1]}", Path(f"gputrain-{os.getuid()}"), json.loads(sys.argv[2])
locks, tick = [], lambda number: None
def lock(path):
    locks.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644))
    fcntl.flock(locks[-1], fcntl.LOCK_EX)
def entry(folder=own, name="1-1", text=None, **changes):
    folder.mkdir(exist_ok=True)
    values = {"format": 1, "run": "evil", "since": 1.0, "selection": "all", "visible": gpus, "gpus": [],
              "ranks": [], "write_lock": False, **changes}
    (folder / f"{name}.json").write_text(json.dumps(values) if text is None else text)
    lock(folder / f"{name}.lock")
exec(sys.argv[3])
pid = os.fork()
if pid == 0:
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number in range(3000):
        tick(number)
        time.sleep(0.1)
else:
    print(pid)
"""
# One new entry replaces the one before, ten times per second.
ROTATING_WAITER = """
def tick(number):
    entry(name=f"2-{number}")
    if number:
        (own / f"2-{number - 1}.lock").unlink()
        (own / f"2-{number - 1}.json").unlink()
        os.close(locks.pop(0))
"""
ENTRIES = {
    "an infinite PID": 'entry(text=\'{"run": "a", "since": 1, "gpus": [], "ranks": [], "pid": Infinity}\')',
    "an infinite time": 'entry(text=json.dumps({"run": "a", "since": 1}).replace("1", "1e999"))',
    "a rank with a large PID": 'entry(gpus=["x"], ranks=[{"run": "a", "rank": 0, "pid": 1 << 70, "uuid": gpus[0]}])',
    "a deep list": 'entry(text="[" * 60000)',
    "a sparse file": 'entry(); os.truncate(own / "1-1.json", 30 << 30)',
    "a pipe as entry": 'entry(); (own / "1-1.json").unlink(); os.mkfifo(own / "1-1.json")',
    "a pipe as lock of an entry": 'own.mkdir(); os.mkfifo(own / "1-1.lock")',
    "a pipe as host lock": 'os.mkfifo("gputrain.lock")',
    "a folder as host lock": 'os.mkdir("gputrain.lock")',
    "a link as host lock": 'os.symlink("/nowhere", "gputrain.lock")',
    "a host lock that is held": 'lock("gputrain.lock")',
    "the victim's folder": "os.mkdir(victim)",
    "the victim's folder as pipe": "os.mkfifo(victim)",
    "a link to a folder as the victim's": 'os.mkdir("d"); os.symlink("d", victim)',
    "a reservation in the victim's name": "entry(folder=Path(victim), gpus=gpus)",
    "a run that waits for ever": "entry()",
    "many runs that wait for ever": '[entry(name=f"1-{number}") for number in range(50)]',
    "runs that wait for ever in turn": ROTATING_WAITER,
    "a run that waits for too many GPUs": 'entry(selection="free:1000")',
    "a run that waits for a GPU that does not exist": 'entry(selection="free:3", visible=[*gpus, "GPU-x"])',
    "hundreds of entries": '[entry(name=f"1-{number}", text="{") for number in range(300)]',
    "thousands of folders": '[os.mkdir(f"{own}-{number}") for number in range(2000)]',
}
# Allocates as a run does, with shorter timeouts.
VICTIM = """
import json, sys
from engine.gpus import allocation, reservation, run_queue
reservation.LOCK_TIMEOUT_SECONDS = run_queue.CLAIM_TIMEOUT_SECONDS = 0.5
for selection in ("auto", "0,1"):
    found = allocation.allocate_devices(selection, "mine", wait=False, on_wait=lambda _: None)
    warnings = [[warning.code, str(warning)] for warning in found.warnings]
    print(json.dumps([[device.uuid for device in found.devices], warnings]))
    found.reservation.release()
"""


def attack(stage: Stage) -> None:
    driver = stage.home / "driver"
    driver.mkdir()
    host = FakeGpuHost(stage.home, build_fake_driver(driver))
    host.set_scene(gpu_line(0, used=100), gpu_line(1, used=100))
    stage.environment |= host.environment | {"GPUTRAIN_RESERVATIONS": str(stage.shared)}
    stage.environment.pop("CUDA_VISIBLE_DEVICES", None)
    for name, program in ENTRIES.items():
        with_entry(stage, name, program)
    # What is allowed: the attacker's own claim makes GPUs look busy. Training on the CPU is then announced.
    pid = plant(stage, "entry(gpus=gpus)")
    (auto, warnings), (named, _) = victim(stage)
    [code, message] = warnings[0]
    stage.gained(auto != [] or code != "gpu-fallback", "GPUs without the victim's knowledge")
    stage.gained("user uid 12345" not in message, "a claim in another user's name")
    stage.gained(named != GPUS, "GPUs that are selected by name")
    shown = stage.gputrain("gpus", "--json")
    stage.gained([gpu["runs"] for gpu in parse_gpus_json(shown.stdout)] != [["evil"]] * 2, "a monitor that fails")
    clean(stage, pid)


def with_entry(stage: Stage, name: str, program: str) -> None:
    """Check what the victim gets while an entry is planted."""
    pid = plant(stage, program)
    try:
        for devices, warnings in victim(stage):
            stage.gained(devices != GPUS, f"a run without GPUs by {name} ({warnings})")
    except (subprocess.SubprocessError, ValueError) as error:
        stage.gained(True, f"a run that fails by {name} ({error})")
    clean(stage, pid)


def plant(stage: Stage, program: str) -> int:
    return int(stage.as_attacker(PLANT, str(os.getuid()), json.dumps(GPUS), program))


def victim(stage: Stage) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Return the devices, and code and text of the warnings, for "auto" and for named GPUs.

    Raises SubprocessError if it fails or hangs."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", VICTIM],
        cwd=stage.home, env=stage.environment, text=True, capture_output=True, timeout=15, check=True,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def clean(stage: Stage, pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for path in stage.shared.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    perform(attack)

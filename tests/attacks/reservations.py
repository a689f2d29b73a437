"""A second user plants entries in the shared folder of GPU reservations. The victim must get the GPUs nevertheless.

Only a valid reservation of the attacker's own may make GPUs look in use. Then the victim gets a warning
before it trains on the CPU. Each other entry has a control, which shows that the victim reads it: without what makes it
an attack, it has its effect.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

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
    fcntl.fcntl(locks[-1], fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
def entry(folder=own, name="1-1", text=lambda valid: valid, **changes):
    folder.mkdir(exist_ok=True)
    values = {"format": 1, "run": "evil", "since": 1.0, "selection": "all", "visible": gpus, "gpus": [],
              "ranks": [], "priority": 0, "blocked": "", "share": 1, **changes}
    (folder / f"{name}.json").write_text(text(json.dumps(values)))
    lock(folder / f"{name}.lock")
def rank_entry(pid):
    entry(gpus=gpus, ranks=[{"run": "a", "rank": 0, "pid": pid, "uuid": gpus[0]}])
def nested_entry(depth):
    entry(gpus=gpus, text=lambda valid: valid[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
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


class Effect(Enum):
    """What an entry does to a victim that reads it."""

    IN_USE = "its GPUs look in use"
    AHEAD = "a run is ahead of the victim in the queue"
    OTHER_FOLDER = "the victim reserves GPUs in a folder with a suffix"


class Entry(NamedTuple):
    """What the attacker plants, its effect, and the control: a program that has this effect, by default the same.

    `by_victim` tells that the victim runs the control: the attack is that another user owns the files."""

    program: str
    effect: Effect
    control: str = ""
    by_victim: bool = False


VALID = "entry(gpus=gpus)"
UNREADABLE = {
    "an infinite PID": 'rank_entry(float("inf"))',
    "a PID that overflows": "entry(gpus=gpus, text=lambda valid: valid.replace('\"ranks\": []', "
    '\'"ranks": [{"run": "a", "rank": 0, "pid": 1e999, "uuid": "x"}]\'))',
    "an infinite time": 'entry(gpus=gpus, since=float("inf"))',
    "a time that overflows": 'entry(gpus=gpus, text=lambda valid: valid.replace("1.0", "1e999"))',
    "a rank with a large PID": "rank_entry(1 << 70)",
    "a deep list": "nested_entry(30_000)",
    "a sparse file": f'{VALID}; os.truncate(own / "1-1.json", 30 << 30)',
    "an entry of a later version": "entry(gpus=gpus, format=9)",
}
ENTRIES = {
    **{name: Entry(program, Effect.IN_USE, VALID) for name, program in UNREADABLE.items()},
    "more entries than are read": Entry(
        '[entry(name=f"1-{number}", visible=gpus * 400) for number in range(600)]', Effect.AHEAD
    ),
    "a pipe as entry": Entry(
        f'{VALID}; (own / "1-1.json").unlink(); os.mkfifo(own / "1-1.json")', Effect.IN_USE, VALID
    ),
    "a pipe as lock of an entry": Entry(
        f'{VALID}; (own / "1-1.lock").unlink(); os.mkfifo(own / "1-1.lock")', Effect.IN_USE, VALID
    ),
    "the victim's folder": Entry("os.mkdir(victim)", Effect.OTHER_FOLDER),
    "the victim's folder as pipe": Entry("os.mkfifo(victim)", Effect.OTHER_FOLDER),
    "a link to a folder as the victim's": Entry('os.mkdir("d"); os.symlink("d", victim)', Effect.OTHER_FOLDER),
    "a reservation in the victim's name": Entry(
        "entry(folder=Path(victim), gpus=gpus)", Effect.IN_USE, "entry(folder=Path(victim), gpus=gpus)", by_victim=True
    ),
    "a run that waits for ever": Entry("entry()", Effect.AHEAD),
    "many runs that wait for ever": Entry('[entry(name=f"1-{number}") for number in range(50)]', Effect.AHEAD),
    "runs that wait for ever in turn": Entry(ROTATING_WAITER, Effect.AHEAD),
    "a run that waits for too many GPUs": Entry('entry(selection="free:1000")', Effect.AHEAD),
    "a run that waits for a GPU that does not exist": Entry(
        'entry(selection="free:3", visible=[*gpus, "GPU-x"])', Effect.AHEAD
    ),
    "hundreds of entries": Entry(
        '[entry(name=f"1-{number}", gpus=gpus, text=lambda valid: valid[:1]) for number in range(300)]',
        Effect.IN_USE,
        '[entry(name=f"1-{number}", gpus=gpus) for number in range(300)]',
    ),
    "thousands of folders": Entry(
        '[os.mkdir(f"{own}-{number}") for number in range(2000)]',
        Effect.IN_USE,
        'entry(folder=Path(f"{own}-1"), gpus=gpus)',
    ),
}
# Allocates as a run does, with shorter timeouts.
VICTIM = """
import json, os, sys
from engine.gpus import allocation, reservation, reservation_reader, run_queue
run_queue.CLAIM_TIMEOUT_SECONDS = 0.5
for selection in ("auto", "0,1"):
    ahead = [each.run for each in reservation_reader.read_reservations() if each.is_waiting]
    found = allocation.allocate_devices(selection, "mine", wait=False, on_wait=lambda _: None)
    warnings = [[warning.code, str(warning)] for warning in found.warnings]
    folders = reservation.reservations_root().glob("gputrain-*")
    folders = [path.name for path in folders if path.lstat().st_uid == os.getuid()]
    devices = [device.uuid for device in found.devices]
    print(json.dumps({"devices": devices, "warnings": warnings, "ahead": ahead, "folders": folders}))
    found.reservation.release()
"""


class Outcome(NamedTuple):
    """What the victim got for one selection, and saw: the names of its folders and of the runs ahead of it."""

    devices: list[str]
    warnings: list[tuple[str, str]]
    ahead: list[str]
    folders: list[str]

    def shows(self, effect: Effect) -> bool:
        own = f"gputrain-{os.getuid()}"
        match effect:
            case Effect.IN_USE:
                return self.devices == [] and self.warnings[0][0] == "gpu-fallback"
            case Effect.AHEAD:
                return "evil" in self.ahead
            case Effect.OTHER_FOLDER:
                return any(name.startswith(f"{own}-") for name in self.folders)


def attack(stage: Stage) -> None:
    driver = stage.home / "driver"
    driver.mkdir()
    host = FakeGpuHost(stage.home, build_fake_driver(driver))
    host.set_scene(gpu_line(0, used=100), gpu_line(1, used=100))
    stage.environment |= host.environment | {"GPUTRAIN_RESERVATIONS": str(stage.shared)}
    stage.environment.pop("CUDA_VISIBLE_DEVICES", None)
    undisturbed = victim(stage)
    assert not any(outcome.shows(effect) for outcome in undisturbed for effect in Effect), undisturbed
    clean(stage)
    for name, entry in ENTRIES.items():
        with_entry(stage, name, entry)
    controls = {(entry.control, entry.effect, entry.by_victim) for entry in ENTRIES.values() if entry.control}
    for control, effect, by_victim in sorted(controls, key=str):
        pid = plant(stage, control, by_victim=by_victim)
        check_control(control, victim(stage), effect)
        clean(stage, pid)
    with_own_entry(stage)


def with_own_entry(stage: Stage) -> None:
    """Check that a reservation makes GPUs look in use by the attacker, and that training on the CPU is announced."""
    name, pid = "a reservation", plant(stage, VALID)
    try:
        auto, named = victim(stage)
        code, message = auto.warnings[0] if auto.warnings else ("", "")
        stage.gained(auto.devices != [] or code != "gpu-fallback", f"GPUs without the victim's knowledge by {name}")
        stage.gained("user uid 12345" not in message, f"a claim in another user's name by {name}")
        stage.gained(named.devices != GPUS, f"GPUs that are selected by name by {name}")
        shown = parse_gpus_json(stage.gputrain("gpus", "--json").stdout)
        stage.gained(
            any(list(gpu["run_owners"].values()) != ["uid 12345"] for gpu in shown), f"a monitor that fails by {name}"
        )
    except (subprocess.SubprocessError, ValueError) as error:
        stage.gained(True, f"a run that fails by {name} ({error})")
    clean(stage, pid)


def with_entry(stage: Stage, name: str, entry: Entry) -> None:
    """Check what the victim gets while an entry is planted."""
    pid = plant(stage, entry.program)
    try:
        outcomes = victim(stage)
        for outcome in outcomes:
            stage.gained(outcome.devices != GPUS, f"a run without GPUs by {name} ({outcome.warnings})")
        if not entry.control:
            check_control(name, outcomes, entry.effect)
    except (subprocess.SubprocessError, ValueError) as error:
        stage.gained(True, f"a run that fails by {name} ({error})")
    clean(stage, pid)


def check_control(name: str, outcomes: list[Outcome], effect: Effect) -> None:
    """Raise AssertionError if an entry has no effect: an attack with it would test nothing."""
    assert any(outcome.shows(effect) for outcome in outcomes), f"{name}: not so: {effect.value}: {outcomes}"


def plant(stage: Stage, program: str, *, by_victim: bool = False) -> int:
    """Run a program as the attacker, or as the victim. Returns the PID of the process that holds its locks."""
    run = stage.as_victim if by_victim else stage.as_attacker
    return int(run(PLANT, str(os.getuid()), json.dumps(GPUS), program))


def victim(stage: Stage) -> list[Outcome]:
    """Return what the victim gets for "auto" and for named GPUs. Raises SubprocessError if it fails or hangs."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", VICTIM],
        cwd=stage.home, env=stage.environment, text=True, capture_output=True, timeout=15, check=True,
    )  # fmt: skip
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return [Outcome(**values) for values in found]


def clean(stage: Stage, pid: int | None = None) -> None:
    """End the process that holds the locks, and remove what it planted."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in stage.shared.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    perform(attack)

"""Start a run elsewhere, `gputrain run --on PLACE`: on a host, or on the first of several that has the GPUs free.

A host starts the run as `gputrain run --detach` does there: in a
session of its own, on GPUs that its own reservations grant. So two users who choose the last free GPU of a host at
once need no lock here: one gets it, and the other one queues.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from engine.base.codec import ENTRIES, Record, decode
from engine.base.errors import UsageError
from engine.base.files import settings_file
from engine.base.text import printable
from engine.base.threads import in_background
from engine.config.run_name import name_problem
from engine.config.schema import Config
from engine.config.settings import read_settings
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices, select
from engine.gpus.snapshot import Gpu
from engine.jobs.hosts.channel import (
    ANY_HOST,
    NEEDS_GPUTRAIN,
    HostUnreachableError,
    ask_gputrain,
    check_host_name,
    parse_hosts,
    run_on,
)
from engine.jobs.hosts.reading import parse_snapshot
from engine.jobs.hosts.shipping import plan_shipment, shares_folder
from engine.jobs.queue.place import fixed_terms

PROMPT_SECONDS = 5.0  # a host that takes longer does not keep one with free GPUs behind it from being chosen
START_TIMEOUT_SECONDS = 300.0  # of the checks of a config, with a busy file server
MAX_SHOWN_CHARS = 300


@dataclass(frozen=True)
class RemoteRequest:
    """A run for another host.

    `words` are those behind `gputrain run` as typed, without --on. `files` are paths here that it cannot do without;
    one of a command needs its `folder`. `environment` are variables that it gets from this shell. With `copies`, the
    code is sent to a host that does not share the folder. `notify` gets sentences for the user."""

    words: Sequence[str]
    config: Config
    folder: Path
    runs_dir: Path
    notify: Callable[[str], object]
    is_command: bool = False
    files: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    copies: bool = False


@dataclass(frozen=True)
class RemoteStart:
    """What became of a request: the name of the run on its host, or the exit code of the command that refused it."""

    host: str
    name: str
    code: int
    messages: Sequence[str]


def start_on(place: str, request: RemoteRequest) -> RemoteStart:
    """Start a run at a place: a host, or `any` with the names of hosts behind a colon.

    Raises UsageError if it is refused here, and HostUnreachableError."""
    kind, _, names = place.partition(":")
    return start_on_any(names, request) if kind == ANY_HOST else start_on_host(place, request)


# ---- One host ----


def start_on_host(host: str, request: RemoteRequest) -> RemoteStart:
    """Start a run on a host, in the folder that it shares with this one, else in a copy, else in the home.

    Raises as `start_on` does."""
    check_host_name(host)
    words, lines, copy = list(request.words), ["cd"], ""
    if shares_folder(host, request.folder):
        if request.copies:
            request.notify(f"{host} shares {request.folder}, so nothing is copied.")
        lines = [f"cd {shlex.quote(str(request.folder))} || exit 2"]
        lines += [f"export GPUTRAIN_RUNS={shlex.quote(str(request.runs_dir))}"]
    elif request.copies:
        shipment = plan_shipment(request.folder, request.runs_dir, request.files)
        request.notify(f"Copying {shipment.plan} to {host}{shipment.left_out}.")
        copy = shipment.send(host)
        words = [shipment.word(word, copy) for word in words if word != "--snapshot"]
        lines = [f"cd {shlex.quote(shipment.folder_in(copy))} || exit 2"]
    elif request.is_command or request.files:
        reason = f"{host} does not share {printable(str(request.folder))} with this host"
        raise UsageError.one("--on", reason, "--copy sends the code, as --snapshot would copy it", code="not-found")
    # The runs of a copy, and of a host without this folder, are in its own runs folder.
    lines += ['export GPUTRAIN_RUNS="${GPUTRAIN_RUNS:-$HOME/runs}"', *environment_lines(request.environment)]
    start = f"( {NEEDS_GPUTRAIN}; exec gputrain run --detach {shlex.join(words)} </dev/null )"
    # Of a run that is refused, no copy stays.
    lines += [f"{start} || {{ code=$?; rm -rf {shlex.quote(copy)}; exit $code; }}" if copy else start]
    with tempfile.TemporaryFile() as file:
        # On stdin: other users see arguments.
        file.write("\n".join(lines).encode(errors="surrogateescape"))
        file.seek(0)
        answer = run_on(host, ["sh", "-s"], stdin=file, timeout_s=START_TIMEOUT_SECONDS)
    name = "" if answer.code else answer.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if answer.code == 0 and name_problem(name) is not None:
        raise HostUnreachableError(f"{host}: answers with {printable(name[:MAX_SHOWN_CHARS])!r} and no name of a run")
    return RemoteStart(host, name, answer.code, answer.messages)


def environment_lines(variables: Mapping[str, str]) -> list[str]:
    """Return lines of a shell that set variables, and the PATH of the virtual environment of this shell, on a host that
    has it, too: there, the same path may belong to somebody else."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    for folder in filter(None, map(os.environ.get, ("CONDA_PREFIX", "VIRTUAL_ENV"))):
        programs = shlex.quote(f"{folder}/bin")
        with suppress(OSError):
            owner = Path(folder, "bin").stat().st_uid
            is_same = f'{{ [ -O {programs} ] || [ "$(stat -Lc %u {programs} 2>/dev/null)" = {owner} ]; }}'
            lines.append(f'{is_same} && PATH={programs}:"$PATH"')
    return lines


# ---- The first of several hosts ----


@dataclass(frozen=True)
class Room:
    """What a host has for a run: `is_cpu` without any GPU, where the run takes the CPU, and `num_waiting` runs in its
    queue if all GPUs are in use. `problem` is why it never fits."""

    host: str
    is_cpu: bool = False
    num_waiting: int | None = None
    problem: str = ""

    @property
    def is_free(self) -> bool:
        """Whether it has what the run asks for."""
        return not self.is_cpu and self.num_waiting is None and not self.problem


def start_on_any(names: str, request: RemoteRequest) -> RemoteStart:
    """Start a run on the first host that has its GPUs free, else in the shortest queue. `names` are separated by
    commas; without any, they are those of the settings. Raises as `start_on` does."""
    hosts = parse_hosts(names or read_settings().hosts)
    if not hosts:
        advice = f"set hosts: [lab1, lab2] in {settings_file()}, or type --on {ANY_HOST}:lab1,lab2"
        raise UsageError.one("--on", f"{ANY_HOST} needs names of hosts", advice, code="missing-value")
    config, rooms = request.config, find_rooms(hosts, request.config)
    fitting = [room for room in rooms if not room.problem]
    room = min(fitting, key=lambda room: (not room.is_free, not room.is_cpu, room.num_waiting or 0), default=None)
    if (problems := [*dict.fromkeys(room.problem for room in rooms if room.problem)]) and not (room and room.is_free):
        request.notify(f"Left out: {'; '.join(problems)}.")
    if room is None:
        raise UsageError.one("--on", f"no host can start a run with --gpus {config.device.gpus}", code="too-few-gpus")
    if room.num_waiting is not None:
        queues = ", ".join(f"{room.host} {room.num_waiting}" for room in fitting if room.num_waiting is not None)
        sentence = f"No host has the GPUs free (--gpus {config.device.gpus})"
        request.notify(f"{sentence}; {room.host} has the shortest queue (runs that wait: {queues}).")
    is_set = config.device.wait or any(word.startswith("device.wait=") for word in request.words)
    if not room.is_cpu and config.device.gpus != "cpu" and not is_set:
        # Somebody else may be faster.
        request = replace(request, words=["--queue", *request.words])
    return start_on_host(room.host, request)


def find_rooms(hosts: Sequence[str], config: Config) -> list[Room]:
    """Ask hosts at once what they have for a run. The list ends with the first one that is free, once those before it
    have answered, or had `PROMPT_SECONDS`."""
    answers = {host: in_background(partial(read_room, host, config)) for host in hosts}
    rooms, deadline = dict[str, Room](), time.monotonic() + PROMPT_SECONDS
    for is_patient in (False, True):
        for host, answer in answers.items():
            with suppress(TimeoutError):
                rooms[host] = answer.result(None if is_patient else max(deadline - time.monotonic(), 0.0))
                if rooms[host].is_free:
                    return [*rooms.values()]
    return [rooms[host] for host in hosts]


class _Queue(Record, frozen=True, kw_only=True):
    queue: Annotated[tuple[dict[str, Any], ...], ENTRIES]


def read_room(host: str, config: Config) -> Room:
    """Return what a host has for a run with this config, judged as the host itself would."""
    terms = fixed_terms(config)
    try:
        snapshot = ask_gputrain(host, ["gpus", "--json"], parse_snapshot)
        gpus = {gpu.uuid: gpu for gpu in snapshot.gpus}
        devices = [
            _unless_reserved(device, gpus[device.parent_uuid or device.uuid], terms)
            for device in cuda_devices(snapshot, terms=terms)
        ]
        try:
            chosen = select(config.device.gpus, devices, only_free=True, shares=terms.shares)
            return Room(host, is_cpu=not chosen and config.device.gpus != "cpu")
        except NotFreeError:
            queue = ask_gputrain(host, ["queue", "--json"], lambda data: decode(data, _Queue)).queue
            return Room(host, num_waiting=sum(row.get("place") is not None for row in queue))
    except HostUnreachableError as error:
        return Room(host, problem=str(error))
    except UsageError as error:
        return Room(host, problem=f"{host}: {error.problems[0].reason}")


def _unless_reserved(device: CudaDevice, gpu: Gpu, terms: QueueTerms) -> CudaDevice:
    """Return a device as unavailable if runs have reserved its GPU, or so much memory that too little is left."""
    used = sum(process.gpu_memory.value or 0 for process in gpu.processes.value or () if process.run in gpu.runs)
    left = (device.unreserved_bytes or 0) - max(gpu.reserved_by_runs - used, 0)
    if not gpu.runs or not device.is_free or (terms.min_free and gpu.reserved_by_runs and left >= terms.min_free):
        return device
    return replace(device, unavailable=Unavailable(Obstacle.RESERVED, f"reserved by run {printable(gpu.runs[0])}"))

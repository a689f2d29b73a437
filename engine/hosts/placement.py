"""Start a run elsewhere, `gputrain run --on PLACE`: on a host, or on the first of several that has the GPUs free.

`ENGINES` is the table of places that are no host. A host starts the run as `gputrain run --detach` does there: in a
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
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from engine.config.run_name import name_problem
from engine.config.schema import Config
from engine.config.settings import read_settings
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.selection import NotFreeError, cuda_devices, select
from engine.gpus.snapshot import Gpu
from engine.hosts.channel import (
    ANY_HOST,
    HostAnswer,
    HostUnreachableError,
    check_host_name,
    failure_words,
    parse_hosts,
    run_on,
)
from engine.hosts.reading import parse_snapshot
from engine.hosts.shipping import plan_shipment, shares_folder
from engine.queue.place import fixed_terms
from engine.utils.codec import ENTRIES, Count, InvalidRecordError, Record, decode
from engine.utils.errors import UsageError
from engine.utils.exit_codes import CommandExit
from engine.utils.files import settings_file
from engine.utils.text import printable
from engine.utils.threads import in_background

PROMPT_SECONDS = 5.0  # a host that takes longer does not keep one with free GPUs behind it from being chosen
START_TIMEOUT_SECONDS = 300.0  # of the checks of a config, with a busy file server
MAX_SHOWN_CHARS = 300
T = TypeVar("T")
# What a host prints on stderr before this line is the noise of its rc files.
MESSAGE_MARKER = b"gputrain-messages\n"
_NO_GPUTRAIN = (
    "no gputrain in the PATH of a command over ssh, in ~/.local/bin or in the folder of the one here; install it "
    "there, or link it into ~/.local/bin"
)
GPUTRAIN_LINES = (
    "printf 'gputrain-%s\\n' messages >&2",
    f"command -v gputrain >/dev/null || {{ echo {shlex.quote(f'error: {_NO_GPUTRAIN}')} >&2; exit 2; }}",
)
"""Lines of a shell that begin the messages of gputrain, and end with a sentence on a host without it."""


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
    """Start a run at a place: a host, or an engine of the table with what follows its colon.

    Raises UsageError if it is refused here, and HostUnreachableError."""
    kind, _, details = place.partition(":")
    start = ENGINES.get(kind)
    return start_on_host(place, request) if start is None else start(details, request)


# ---- One host ----


def start_on_host(host: str, request: RemoteRequest) -> RemoteStart:
    """Start a run on a host, in the folder that it shares with this one, else in a copy, else in the home.

    Raises as `start_on` does."""
    check_host_name(host)
    words, lines = list(request.words), ["cd"]
    if shares_folder(host, request.folder):
        if request.copies:
            request.notify(f"{host} shares {request.folder}, so nothing is copied.")
        lines = [f"cd {shlex.quote(str(request.folder))} || exit 2"]
        lines += [f"export GPUTRAIN_RUNS={shlex.quote(str(request.runs_dir))}"]
    elif request.copies:
        shipment = plan_shipment(request.folder, request.runs_dir, request.files)
        request.notify(f"Copying {shipment.plan} to {host}{shipment.left_out}.")
        target = shipment.send(host)
        words = [shipment.word(word, target) for word in words if word != "--snapshot"]
        lines = [f"cd {shlex.quote(shipment.folder_in(target))} || exit 2"]
    elif request.is_command or request.files:
        reason = f"{host} does not share {printable(str(request.folder))} with this host"
        raise UsageError.one("--on", reason, "--copy sends the code, as --snapshot would copy it", code="not-found")
    script = "\n".join([*lines, *environment_lines(request.environment), *GPUTRAIN_LINES, _start_line(words)])
    with tempfile.TemporaryFile() as file:
        # On stdin: other users see arguments.
        file.write(script.encode(errors="surrogateescape"))
        file.seek(0)
        answer = run_on(host, ["sh", "-s"], stdin=file, timeout_s=START_TIMEOUT_SECONDS)
    return _read_start(host, answer)


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


def _start_line(words: Sequence[str]) -> str:
    # The runs of a copy, and of a host without this folder, are in its own runs folder.
    default = 'export GPUTRAIN_RUNS="${GPUTRAIN_RUNS:-$HOME/runs}"'
    return f"{default}\nexec gputrain run --detach {shlex.join(words)} </dev/null"


def messages_of(stderr: bytes) -> list[str]:
    """Return the lines that gputrain printed on stderr, without those of rc files, escaped."""
    noise, marker, messages = stderr.partition(MESSAGE_MARKER)
    return [printable(line) for line in (messages if marker else noise).decode(errors="replace").splitlines() if line]


def _read_start(host: str, answer: HostAnswer) -> RemoteStart:
    """Return what a host says about a start. Raises HostUnreachableError if that is no name of a run."""
    messages = messages_of(answer.stderr)
    name = "" if answer.code else answer.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if answer.code == 0 and name_problem(name) is not None:
        raise HostUnreachableError(f"{host}: answers with {printable(name[:MAX_SHOWN_CHARS])!r} and no name of a run")
    return RemoteStart(host, name, answer.code, messages)


# ---- The first of several hosts ----


class Fit(IntEnum):
    """How well a host fits a run, the best first: it has what the run asks for, no GPU at all, where the run takes the
    CPU, all GPUs in use, or never enough."""

    FREE = 0
    CPU = 1
    BUSY = 2
    NEVER = 3


@dataclass(frozen=True)
class Room:
    """What a host has for a run. Of a busy one, `num_waiting` is the number of runs in its queue. `problem` is why it
    never fits."""

    host: str
    fit: Fit
    num_waiting: int = 0
    problem: str = ""


def start_on_any(names: str, request: RemoteRequest) -> RemoteStart:
    """Start a run on the first host that has its GPUs free, else in the shortest queue. `names` are separated by
    commas; without any, they are those of the settings. Raises as `start_on` does."""
    hosts = parse_hosts(names or read_settings().hosts)
    if not hosts:
        advice = f"set hosts: [lab1, lab2] in {settings_file()}, or type --on {ANY_HOST}:lab1,lab2"
        raise UsageError.one("--on", f"{ANY_HOST} needs names of hosts", advice, code="missing-value")
    config, rooms = request.config, find_rooms(hosts, request.config)
    room = min(rooms, key=lambda room: (room.fit, room.num_waiting))
    if room.fit is not Fit.FREE and (problems := "; ".join(room.problem for room in rooms if room.problem)):
        request.notify(f"Left out: {problems}.")
    if room.fit is Fit.NEVER:
        raise UsageError.one("--on", f"no host can start a run with --gpus {config.device.gpus}", code="too-few-gpus")
    if room.fit is Fit.BUSY:
        queues = ", ".join(f"{room.host} {room.num_waiting}" for room in rooms if room.fit is Fit.BUSY)
        sentence = f"No host has the GPUs free (--gpus {config.device.gpus})"
        request.notify(f"{sentence}; {room.host} has the shortest queue (runs that wait: {queues}).")
    is_set = config.device.wait or any(word.startswith("device.wait=") for word in request.words)
    if room.fit is not Fit.CPU and config.device.gpus != "cpu" and not is_set:
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
                if rooms[host].fit is Fit.FREE:
                    return [*rooms.values()]
    return [rooms[host] for host in hosts]


class _QueueRow(Record, frozen=True, kw_only=True):
    place: Count | None


class _Queue(Record, frozen=True, kw_only=True):
    queue: Annotated[tuple[_QueueRow, ...], ENTRIES]


def read_room(host: str, config: Config) -> Room:
    """Return what a host has for a run with this config, judged as the host itself would."""
    terms = fixed_terms(config)
    try:
        snapshot = _read_json(host, "gpus", parse_snapshot)
        devices = cuda_devices(snapshot, [_holder(gpu) for gpu in snapshot.gpus if gpu.runs], terms)
        try:
            chosen = select(config.device.gpus, devices, only_free=True, shares=terms.shares)
            return Room(host, Fit.FREE if chosen or config.device.gpus == "cpu" else Fit.CPU)
        except NotFreeError:
            queue = _read_json(host, "queue", lambda data: decode(data, _Queue)).queue
            return Room(host, Fit.BUSY, sum(row.place is not None for row in queue))
    except HostUnreachableError as error:
        return Room(host, Fit.NEVER, problem=str(error))
    except UsageError as error:
        return Room(host, Fit.NEVER, problem=f"{host}: {error.problems[0].reason}")


def _read_json(host: str, command: str, parse: Callable[[bytes], T]) -> T:
    """Return what a command of gputrain prints as JSON on a host. Raises HostUnreachableError without that."""
    answer = run_on(host, ["gputrain", command, "--json"])
    if answer.code == CommandExit.NOT_FOUND:
        raise HostUnreachableError(f"{host}: {_NO_GPUTRAIN}")
    try:
        return parse(answer.stdout)
    except InvalidRecordError as error:
        words_of_host = failure_words(answer.stderr, answer.code) if answer.code else f"its answer {error}"
        raise HostUnreachableError(f"{host}: {words_of_host}") from error


def _holder(gpu: Gpu) -> ReservationInfo:
    """Return a reservation that stands for all runs that have reserved a GPU, or memory of it."""
    uuids = [gpu.uuid, *(instance.uuid for instance in gpu.instances)]
    return ReservationInfo(
        run=gpu.runs[0],
        gpus=tuple(filter(None, uuids)),
        min_free=gpu.reserved_by_runs,
        priority=0,
        blocked="",
        share=1,
        since=0.0,
        position=0.0,
        selection="",
        visible=(),
        ranks=(),
        uid=os.geteuid(),
        user_folder="",
        lock_name="",
    )


ENGINES: Mapping[str, Callable[[str, RemoteRequest], RemoteStart]] = {ANY_HOST: start_on_any}
"""How runs start at places that are no host, by the word before the colon of `--on`."""

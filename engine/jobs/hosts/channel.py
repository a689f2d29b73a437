"""Commands on another host through the program `ssh`, so that `~/.ssh/config`, keys, agents and jump hosts count.

Commands on a host share one connection through a control socket (ssh_config(5), ControlMaster): that of the user if
`~/.ssh/config` names one, else one of gputrain. It ends after its last user, whoever opened it. What a host answers is
data: it is bounded here, and whoever shows it escapes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import shlex
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from engine.base.codec import InvalidRecordError
from engine.base.errors import CodedError, UsageError
from engine.base.exits import exit_status
from engine.base.files import make_user_folder, settings_file
from engine.base.text import printable

ANY_HOST, ALL_HOSTS = "any", "all"
RESERVED_NAMES = (ANY_HOST, ALL_HOSTS, "slurm", "ray")
"""Words that name several hosts or another kind of place where runs start, and no host."""
# What has a meaning for ssh, for a shell or in HOST:RUN is in no name.
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)
MAX_NAME_CHARS = 255

SSH_FAILED = 255  # exit code of ssh when it has no connection, ssh(1)
CONNECT_SECONDS = 10
# A dead connection ends after the product of the two.
ALIVE_SECONDS, ALIVE_COUNT = 5, 2
PERSIST_SECONDS = 10  # how long a connection waits for its next user
OPTIONS = {
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "PermitLocalCommand": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "Compression": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "LogLevel": "ERROR",
}
# A socket path has at most 108 bytes, unix(7). ssh needs 40 of them for %C and 17 for its suffix.
MAX_SOCKET_FOLDER_BYTES = 108 - 40 - 17 - 2

MAX_ANSWER_BYTES = 1 << 24
MAX_WORDS_CHARS = 300
READ_BYTES = 1 << 16
MAX_PAUSE_SECONDS = 3600.0  # epoll_wait(2) takes 24 days at most
DEFAULT_TIMEOUT_SECONDS = 60.0

# Line before the answer on stdout and before that on stderr. What an rc file prints comes before it.
START_MARKER = b"gputrain-starts\n"
# Made of two parts, so that a shell that prints its commands does not print the marker.
_PRINT_MARKERS = "printf 'gputrain-%s\\n' starts; printf 'gputrain-%s\\n' starts >&2"
NEEDS_GPUTRAIN = (
    "command -v gputrain >/dev/null || { echo 'error: no gputrain in the PATH of a command over ssh, in ~/.local/bin "
    "or in the folder of the one here; install it there, or link it into ~/.local/bin' >&2; exit 2; }"
)
"""Line of a shell that ends with a sentence on a host without gputrain."""
# sshd does not give a command the PATH of a login shell. So two folders are searched as well: ~/.local/bin, and the one
# that gputrain has here. A program there counts only if the user owns it.
_FIND_GPUTRAIN = 'for bin in "$HOME/.local/bin" {}; do [ -O "$bin/gputrain" ] && PATH="$PATH:$bin"; done'

_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


class HostUnreachableError(CodedError):
    """A host cannot be reached. The message says why, in the words of ssh."""

    code = "unreachable"


@dataclass(frozen=True)
class HostAnswer:
    """What a command on a host answered, without what its rc files print. `code` is its exit code."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def messages(self) -> list[str]:
        """The lines of stderr, escaped."""
        return [printable(line) for line in self.stderr.decode(errors="replace").splitlines() if line]


def check_host_name(name: str) -> str:
    """Return the name of a host, which may be an alias of `~/.ssh/config` or USER@HOST. Raises UsageError."""
    if name in RESERVED_NAMES:
        reason = f"{name} is a reserved word and no host; give the host another alias in ~/.ssh/config"
    elif len(name) > MAX_NAME_CHARS or not _HOST_NAME.fullmatch(name):
        reason = (
            f"{printable(name[:MAX_NAME_CHARS])!r} is no host: a name has letters, digits, dots and minus signs; "
            "give any other address an alias in ~/.ssh/config"
        )
    else:
        return name
    raise UsageError.one("host", reason, code="invalid-value")


def parse_hosts(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the checked names of hosts, each once, of a list or `lab1,lab2`; `all` are those of the user's settings.

    Raises UsageError for a name that no host has, and if the settings have no hosts.
    """
    if names == ALL_HOSTS:
        from engine.config.settings import read_settings

        names = read_settings().hosts
        if not names:
            reason = f"there are none in {settings_file()}; name hosts, or add `hosts: [lab1, lab2]` there"
            raise UsageError.one("hosts", reason, code="not-found")
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(check_host_name(part.strip()) for part in parts))


def ssh_argv(host: str, command: str, *, terminal: bool = False, ask: bool = False, shares: bool = False) -> list[str]:
    """Return the arguments of ssh that run a `remote_command`.

    With `terminal` it gets the terminal. With `ask`, ssh asks for passwords and new host keys; without, it fails where
    it would ask. With `shares`, others may share its connection, also after its end.
    """
    options = OPTIONS | {"BatchMode": "no" if ask else "yes", **_control_options(check_host_name(host), shares=shares)}
    flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", *flags, "-t" if terminal else "-T", "--", host, command]


def _control_options(host: str, *, shares: bool) -> Mapping[str, str]:
    options = {"ControlMaster": "auto" if shares else "no", "ControlPersist": str(PERSIST_SECONDS)}
    configured = _read_ssh_config(host)
    if configured.get("controlpath", "none") != "none":
        # A socket of the user, with a login that may have taken a second factor.
        return options | ({"ControlPersist": value} if (value := configured["controlpersist"]) != "no" else {})
    folder = _socket_folder()
    return (
        {"ControlMaster": "no", "ControlPath": "none"} if folder is None else options | {"ControlPath": f"{folder}/%C"}
    )


def _read_ssh_config(host: str) -> Mapping[str, str]:
    """Return what `~/.ssh/config` sets for a host by the names of the options; empty if ssh does not tell."""
    try:
        told = subprocess.run(  # noqa: S603 (the user's ssh)
            ["ssh", "-G", "--", host],  # noqa: S607
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CONNECT_SECONDS,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {
        name: value for name, _, value in (line.partition(" ") for line in told.decode(errors="replace").splitlines())
    }


def _socket_folder() -> str | None:
    """Return a folder for control sockets that only this user can change; None if there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # `gputrain-UID` in /tmp is that of the reservations, which all users read.
    root = Path(runtime) / "gputrain" if runtime else Path(tempfile.gettempdir()) / f"gputrain-ssh-{os.getuid()}"
    with suppress(OSError):
        folder = os.fspath(make_user_folder(root))
        # ssh expands % in it.
        if len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER_BYTES and "%" not in folder:
            return folder
    return None


def remote_command(argv: Sequence[str] = (), script: str = 'exec "$@"', *, marks: bool = True) -> str:
    """Return text for the login shell of a host that runs a line of a POSIX shell there, in the home, with `argv` as
    "$@"; by default it runs `argv`.

    A gputrain of this user there is found as in a login shell. With `marks`, stdout and stderr begin with
    `START_MARKER`.
    """
    own_folder = shlex.quote(sysconfig.get_path("scripts"))
    parts = [_FIND_GPUTRAIN.format(own_folder), *([_PRINT_MARKERS] if marks else []), script]
    return f"exec sh -c {shlex.quote('; '.join(parts))} {shlex.join(['gputrain', *argv])}"


def start_ssh(argv: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start ssh, which ends when the calling thread does, also when this process is killed.

    Raises HostUnreachableError if there is no ssh.
    """
    # Looked up before the fork, after which only system calls are safe while other threads run.
    prctl = ctypes.CDLL(None).prctl
    try:
        return subprocess.Popen(  # noqa: S603 (the user's ssh)
            argv,
            bufsize=0,
            preexec_fn=partial(prctl, _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            **streams,
        )
    except OSError as error:
        raise HostUnreachableError(f"ssh cannot be started: {error.strerror}", code="not-installed") from error


def ask_on_terminal(host: str, **streams: Any) -> int:
    """Connect to a host on this terminal, where ssh asks for passwords and new host keys. Return its exit code.

    The next command shares that connection."""
    argv = ssh_argv(host, remote_command(["true"], marks=False), ask=True, shares=True)
    with start_ssh(argv, **streams) as process:
        return process.wait()


def run_on(
    host: str,
    argv: Sequence[str] = (),
    script: str = 'exec "$@"',
    *,
    timeout_s: float = DEFAULT_TIMEOUT_SECONDS,
    stdin: IO[bytes] | None = None,
    show: Callable[[bytes, int], object] | None = None,
) -> HostAnswer:
    """Run a `remote_command` on a host, and return what it answers.

    `show` gets each line at once, and 1 or 2 for stdout or stderr; the answer is then without lines. Raises
    HostUnreachableError if there is no answer in time, or a longer one than `MAX_ANSWER_BYTES`, and what `show` raises.
    """
    command = ssh_argv(host, remote_command(argv, script))
    streams = {"stdin": stdin or subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_ssh(command, **streams) as process:
        try:
            output, errors = _read_both(process, time.monotonic() + timeout_s, show)
            code = process.wait(timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise HostUnreachableError(f"{host}: no answer within {timeout_s:.0f} s", code="timed-out") from None
        except OverflowError as error:
            raise HostUnreachableError(f"{host}: {error}", code="too-large") from None
        finally:
            process.kill()
    noise, marker, answer = output.partition(START_MARKER)
    words, is_marked, messages = errors.partition(START_MARKER)
    if not marker or code == SSH_FAILED:
        raise HostUnreachableError(f"{host}: {failure_words(messages or words or noise, code)}")
    return HostAnswer(code, answer, messages if is_marked else words)


def ask_gputrain(host: str, words: Sequence[str], parse: Callable[[bytes], T], script: str = 'exec gputrain "$@"') -> T:
    """Return what a command of gputrain prints as JSON on a host. Raises HostUnreachableError without that."""
    answer = run_on(host, words, f"{NEEDS_GPUTRAIN}; {script}")
    try:
        return parse(answer.stdout)
    except InvalidRecordError as error:
        told = "; ".join(answer.messages).removeprefix("error: ") if answer.code else ""
        raise HostUnreachableError(f"{host}: {told or f'its answer {error}'}", code=error.code) from error


def _read_both(
    process: subprocess.Popen[bytes], deadline: float, show: Callable[[bytes, int], object] | None
) -> tuple[bytes, bytes]:
    """Return stdout and stderr of a process, without the lines that `show` got. Raises TimeoutError, and OverflowError
    if they are too long."""
    assert process.stdout is not None and process.stderr is not None  # noqa: S101 (for mypy)
    read = {1: bytearray(), 2: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream, handle in ((1, process.stdout), (2, process.stderr)):
            selector.register(handle, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(min(max(deadline - time.monotonic(), 0.0), MAX_PAUSE_SECONDS))
            if time.monotonic() > deadline:
                raise TimeoutError
            for key, _ in ready:
                data, buffer = os.read(key.fd, READ_BYTES), read[key.data]
                buffer += data
                if not data:
                    selector.unregister(key.fd)
                if show is not None:
                    _show_lines(buffer, key.data, show, is_last=not data)
                if len(buffer) > MAX_ANSWER_BYTES:
                    raise OverflowError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(read[1]), bytes(read[2])


def _show_lines(buffer: bytearray, stream: int, show: Callable[[bytes, int], object], *, is_last: bool) -> None:
    """Take the lines after the marker, which stays."""
    _, marker, text = bytes(buffer).partition(START_MARKER)
    *lines, rest = text.split(b"\n")
    if marker:
        for line in [*lines, rest] if is_last and rest else lines:
            show(line, stream)
        buffer[:] = marker + (b"" if is_last else rest)


def failure_words(stderr: bytes, code: int | None) -> str:
    """Return why ssh has failed, in its words: the last line that it printed, and the title of a boxed warning such as
    that of a changed host key."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    titles = [title for line in lines if line.startswith("@") and (title := line.strip("@ "))]
    if lines:
        return printable(" ".join([*titles, lines[-1]]))[:MAX_WORDS_CHARS]
    # It says nothing of a connection that was lost.
    return "the connection was lost" if code in (None, SSH_FAILED) else f"ssh {exit_status(code)}"

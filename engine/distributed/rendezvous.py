"""Rendezvous of the ranks: an anonymous file on one host, else a TCP address, environment variables or a shared file.

`engine.launch` checks `device.init_method` before the ranks start; each rank then opens the store.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from engine.config.schema import Config
from engine.distributed.rank_env import RankInfo
from engine.utils.errors import CodedError, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store

INIT_METHOD_KEY = "device.init_method"
# Allowed clock difference between this host and a file server.
MAX_CLOCK_SKEW_SECONDS = 5.0


class RendezvousTimeoutError(CodedError):
    """A rank did not respond in time during the setup. The message names it."""

    code = "timed-out"


def check_rendezvous(init_method: str, environ: Mapping[str, str]) -> None:
    """Check the rendezvous of ranks that this process will spawn. Raises UsageError if it cannot succeed."""
    if init_method.startswith("file://"):
        _check_rendezvous_file(_file_path(init_method))
    elif init_method != "auto":
        _check_can_listen(*_host_and_port(init_method, environ))


def check_external_rendezvous(init_method: str, environ: Mapping[str, str], rank: int) -> None:
    """Check the rendezvous of a rank that torchrun or srun started; other ranks may already have created the file.

    Raises UsageError if it cannot succeed.
    """
    if init_method.startswith("file://"):
        if int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
            reason = "restarted ranks would read the file of the previous attempt; start torchrun with --max-restarts 0"
            raise UsageError.one(INIT_METHOD_KEY, f"{reason}, or remove {INIT_METHOD_KEY}", code="conflict")
        _check_rendezvous_file(
            _file_path(init_method), psutil.Process(os.getppid()).create_time() - MAX_CLOCK_SKEW_SECONDS
        )
    elif init_method.startswith("tcp://") and rank == 0:
        host, port = _host_and_port(init_method, environ)
        is_torchrun_address = (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) == (host, str(port))
        if not (is_torchrun_address and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
            _check_can_listen(host, port)


def create_store_file() -> int:
    """Return a file descriptor for `open_local_store`, which the ranks of this host inherit.

    The file is anonymous memory: it has no name that another user could open, and the kernel frees it with the last
    process that holds the descriptor. A TCP store would accept a connection from any user of the host.

    Gloo still listens on a TCP port per rank and process group, on loopback if all ranks run on this host. It accepts
    any connection, and identifies the peer by a small number that others can guess. So while the ranks connect, another
    user can pose as a rank and send wrong tensors, but no objects that would be unpickled
    (`engine.distributed.collectives`).
    """
    return os.memfd_create("gputrain-store")


def open_local_store(fd: int, timeout_s: float) -> Store:
    """Return the store of ranks that all run on this host, in the file that `create_store_file` created."""
    import torch.distributed as dist

    # The store opens its file anew for each operation, even in its destructor, so this descriptor is never closed. Each
    # open of the path is a new open file description, so the flock of one process excludes the others. Without a number
    # of workers the store does not delete its file.
    store: Store = dist.FileStore(f"/proc/self/fd/{os.dup(fd)}", -1)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def open_store(config: Config, rank_info: RankInfo) -> Store:
    """Return the store through which the ranks rendezvous.

    Raises the errors of torch.distributed if not all ranks join within `device.timeout` seconds.
    """
    import torch.distributed as dist

    method, timeout = config.device.init_method, timedelta(seconds=config.device.timeout)
    url = "env://" if method == "auto" else method
    store: Store = next(dist.rendezvous(url, rank_info.rank, rank_info.world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    return keep_until_exit(store)


def keep_until_exit(store: Store) -> Store:
    """Return the store, with a reference that is never released.

    A FileStore adds two keys to its file when it is freed. That creates the file again if rank 0 removes it in between.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def store_timeout_s(store: Store) -> float:
    """Return `device.timeout`, which `open_store` has set."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined] # missing in torch's stubs
    return timeout.total_seconds()


def wait_for_ranks(store: Store, rank_info: RankInfo, timeout_s: float) -> None:
    """Wait until all ranks have called this. Raises RendezvousTimeoutError, which names those that have not."""
    keys = {rank: f"joined/{rank}" for rank in range(rank_info.world_size)}
    store.set(keys[rank_info.rank], "")
    # The timeout error of the store does not tell which ranks are missing. After any other error, `check` fails too.
    with suppress(RuntimeError):
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    missing = [str(rank) for rank, key in keys.items() if not store.check([key])]
    if missing:
        noun = "rank" if len(missing) == 1 else "ranks"
        raise RendezvousTimeoutError(
            f"{noun} {', '.join(missing)} did not join the process group within {timeout_s:g} s; "
            "increase device.timeout if their setup takes longer",
        )


def get_from_rank(store: Store, rank: int, key: str) -> bytes:
    """Return the value that a rank stores under `key`. Raises RendezvousTimeoutError."""
    began, timeout_s = time.monotonic(), store_timeout_s(store)
    try:
        return store.get(key)
    except RuntimeError as error:
        if time.monotonic() - began < timeout_s:
            raise
        raise RendezvousTimeoutError(
            f"rank {rank} did not send its {key.partition('/')[0]} within {timeout_s:g} s; increase device.timeout if "
            "that takes longer",
        ) from error


def remove_rendezvous_file(init_method: str) -> None:
    """Delete the rendezvous file of a run. Later ranks would read its stale content and hang."""
    if init_method.startswith("file://"):
        with suppress(OSError):
            _file_path(init_method).unlink()


def _file_path(init_method: str) -> Path:
    return Path(init_method.removeprefix("file://"))


def _host_and_port(init_method: str, environ: Mapping[str, str]) -> tuple[str, int]:
    if init_method == "env://":
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            variables = f"MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
            raise UsageError.one(
                INIT_METHOD_KEY,
                f"env:// needs a host and a port in the environment, but {variables}",
                code="invalid-value",
            )
        return host, int(port)
    url = urlsplit(init_method)
    return str(url.hostname), int(url.port or 0)


def _check_rendezvous_file(path: Path, allowed_since: float | None = None) -> None:
    """Check that the file is new and its folder writable. Raises UsageError if not.

    A file modified after `allowed_since` (Unix seconds) is accepted, because other ranks of this run may have created
    it.
    """
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError.one(
            INIT_METHOD_KEY,
            f"{path.parent} is not a writable folder; use a file in another folder",
            code="not-writable",
        )
    with suppress(FileNotFoundError):
        if allowed_since is None or not path.is_file() or path.stat().st_mtime < allowed_since:
            path.lstat()
            raise UsageError.one(
                INIT_METHOD_KEY,
                f"{path} already exists, perhaps from an earlier run; delete it or use another file",
                code="name-in-use",
            )


def _check_can_listen(host: str, port: int) -> None:
    """Check that rank 0, which runs on this host, can listen on the address. Raises UsageError if not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
    except OSError as error:
        raise UsageError.one(
            INIT_METHOD_KEY,
            f"{host} is not an address of this host, where rank 0 listens ({error.strerror}); use one that is",
            code="invalid-value",
        ) from error
    try:
        with socket.socket(family, kind, protocol) as probe:
            # Like torch, which listens on all addresses.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
    except OSError as error:
        raise UsageError.one(
            INIT_METHOD_KEY,
            f"port {port} cannot be used on this host ({error.strerror}); use another port",
            code="address-in-use",
        ) from error

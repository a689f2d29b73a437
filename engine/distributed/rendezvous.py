"""How the ranks of a run find each other, where `device.init_method` says it: at an address, or by a file."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from engine.config.schema import Config
from engine.distributed.rank_env import RankInfo
from engine.utils.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store

INIT_METHOD_KEY = "device.init_method"
# Clocks of a file server and of its hosts may differ by so much.
MAX_CLOCK_SKEW_SECONDS = 5.0


def check_rendezvous(init_method: str, environ: Mapping[str, str]) -> None:
    """Raises UsageError where the ranks that this process is about to spawn could not meet so."""
    if init_method.startswith("file://"):
        _check_rendezvous_file(_file_path(init_method))
    elif init_method != "auto":
        _check_can_listen(*_host_and_port(init_method, environ))


def check_external_rendezvous(init_method: str, environ: Mapping[str, str], rank: int) -> None:
    """The same for a rank that a launcher started, which others may be ahead of. Raises UsageError."""
    if init_method.startswith("file://"):
        if int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
            why = "ranks that torchrun starts again would find what those before them wrote; give it --max-restarts 0"
            raise UsageError.one(INIT_METHOD_KEY, f"{why}, or leave {INIT_METHOD_KEY} out")
        _check_rendezvous_file(
            _file_path(init_method), psutil.Process(os.getppid()).create_time() - MAX_CLOCK_SKEW_SECONDS
        )
    elif init_method.startswith("tcp://") and rank == 0:
        host, port = _host_and_port(init_method, environ)
        torchruns = (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) == (host, str(port))
        if not (torchruns and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
            _check_can_listen(host, port)


def open_store(config: Config, rank_info: RankInfo) -> Store:
    """Where this rank meets the others. Raises torch's errors where they do not come within `device.timeout`."""
    import torch.distributed as dist

    method, timeout = config.device.init_method, timedelta(seconds=config.device.timeout)
    url = "env://" if method == "auto" else method
    store: Store = next(dist.rendezvous(url, rank_info.rank, rank_info.world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def remove_rendezvous_file(init_method: str) -> None:
    """Take away the file by which the ranks of a run met: the next ones would take it for theirs, and hang."""
    if init_method.startswith("file://"):
        with suppress(OSError):
            _file_path(init_method).unlink()


def _file_path(init_method: str) -> Path:
    return Path(init_method.removeprefix("file://"))


def _host_and_port(init_method: str, environ: Mapping[str, str]) -> tuple[str, int]:
    if init_method == "env://":
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            shown = f"MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
            raise UsageError.one(
                INIT_METHOD_KEY, f"env:// needs an address and a port in the environment, which has {shown}"
            )
        return host, int(port)
    url = urlsplit(init_method)
    return str(url.hostname), int(url.port or 0)


def _check_rendezvous_file(path: Path, allowed_since: float | None = None) -> None:
    """One written after `allowed_since` may be of other ranks of this run."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError.one(INIT_METHOD_KEY, f"{path.parent} is no folder that can be written to; give another file")
    with suppress(FileNotFoundError):
        if allowed_since is None or not path.is_file() or path.stat().st_mtime < allowed_since:
            path.lstat()
            raise UsageError.one(
                INIT_METHOD_KEY, f"{path} exists, perhaps from an earlier run; remove it or give another file"
            )


def _check_can_listen(host: str, port: int) -> None:
    """Rank 0 listens there, which is of this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
    except OSError as error:
        raise UsageError.one(
            INIT_METHOD_KEY,
            f"{host} is no address of this host, on which rank 0 is ({error.strerror}); give one that is",
        ) from error
    try:
        with socket.socket(family, kind, protocol) as probe:
            # As torch does, which listens on every address.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
    except OSError as error:
        raise UsageError.one(
            INIT_METHOD_KEY, f"port {port} cannot be had here ({error.strerror}); give another"
        ) from error

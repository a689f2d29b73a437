"""Rendezvous of the ranks: an anonymous file on one host, else the address in environment variables.

`engine.jobs.launch` checks `device.init_method` before the ranks start; each rank then opens the store.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from engine.base.errors import CodedError, UsageError
from engine.config.schema import Config
from engine.train.distributed.rank_env import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

INIT_METHOD_KEY = "device.init_method"


class RendezvousTimeoutError(CodedError):
    """A rank did not respond in time during the setup. The message names it."""

    code = "timed-out"


def check_rendezvous(init_method: str, environ: Mapping[str, str]) -> None:
    """Check the rendezvous of ranks that this process will spawn. Raises UsageError if it cannot succeed."""
    if init_method != "env://":
        return
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        reason = f"env:// needs a host and a port in the environment, but MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
        raise UsageError.one(INIT_METHOD_KEY, reason, code="invalid-value")
    try:
        # torch waits minutes for a store on another host, and names a port in use only after the ranks have started.
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Like torch, which listens on a port that an earlier run has just closed.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason = f"port {port} cannot be used on this host ({error.strerror}); use another port"
            raise UsageError.one(INIT_METHOD_KEY, reason, code="address-in-use") from error
        reason = f"{host} is not an address of this host, where rank 0 listens ({error.strerror}); use one that is"
        raise UsageError.one(INIT_METHOD_KEY, reason, code="invalid-value") from error


def create_store_file() -> int:
    """Return a file descriptor for `open_local_store`, which the ranks of this host inherit.

    The file is anonymous memory: it has no name that another user could open, and the kernel frees it with the last
    process that holds the descriptor. A TCP store would accept a connection from any user of the host.

    Gloo still listens on a TCP port per rank and process group, on loopback if all ranks run on this host. It accepts
    any connection, and identifies the peer by a small number that others can guess. So while the ranks connect, another
    user can pose as a rank and send wrong tensors, but no objects that would be unpickled
    (`engine.train.distributed.collectives`).
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
    """Return the store at MASTER_ADDR and MASTER_PORT, through which the ranks rendezvous.

    Raises the errors of torch.distributed if not all ranks join within `device.timeout` seconds.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=config.device.timeout)
    store: Store = next(dist.rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def store_timeout_s(store: Store) -> float:
    """Return `device.timeout`, which `open_store` has set."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined] # missing in torch's stubs
    return timeout.total_seconds()


def await_keys(store: Store, keys: Mapping[int, str]) -> None:
    """Wait until each rank has stored its key. Raises RendezvousTimeoutError, which names those that have not."""
    with suppress(RuntimeError):
        store.wait([*keys.values()])
        return
    # The timeout error of the store does not tell which ranks are missing. After any other error, `check` fails too.
    if missing := [str(rank) for rank, key in keys.items() if not store.check([key])]:
        who, whose = ("rank", "its") if len(missing) == 1 else ("ranks", "their")
        what = next(iter(keys.values())).partition("/")[0]
        raise RendezvousTimeoutError(
            f"{who} {', '.join(missing)} did not send {whose} {what} within {store_timeout_s(store):g} s; increase "
            "device.timeout if that takes longer",
        )

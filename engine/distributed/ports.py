"""Close the TCP ports on which Gloo listens, once the ranks are connected.

Gloo accepts connections as long as a process group exists, from any user who can reach the port. After the ranks are
connected, it needs no further connection. It never closes an unknown one, and aborts the rank when too many files are
open.
`process_group` closes them. NCCL connects to its own ports during training, so it must open none in this context.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# socket(7); Python has no name for it.
SO_ATTACH_FILTER = 26
# A program of the Berkeley Packet Filter (struct sock_filter) that drops every packet: return 0 bytes of it.
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


@contextmanager
def close_ports_afterwards() -> Iterator[None]:
    """At the end of this context, drop new connections to TCP ports on which this process began to listen in it.

    Connections that are already accepted remain. With TORCH_GLOO_LAZY_INIT=1 the ports stay open, because Gloo then
    connects two ranks only when they first communicate.
    """
    earlier = {status.st_ino for status, _ in _listening_sockets()}
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":
        return
    program = ctypes.create_string_buffer(_DROP_ALL)
    # struct sock_fprog
    attachment = struct.pack("HP", 1, ctypes.addressof(program))
    for status, sock in _listening_sockets():
        if status.st_ino not in earlier:
            # Not closed: Gloo would take an error of its listener for a failure. A sandbox may not have filters.
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attachment)


def _listening_sockets() -> Iterator[tuple[os.stat_result, socket.socket]]:
    """Yield status and a duplicate of each listening TCP socket of this process."""
    for path in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is gone.
        with suppress(OSError):
            status = os.fstat(int(path.name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield status, sock

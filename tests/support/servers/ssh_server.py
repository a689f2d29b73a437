"""Real hosts: an sshd of this user per host on a port of its own, and `ssh` on PATH with their aliases."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from engine.base.process import user_name
from engine.base.wait import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
SSH = shutil.which("ssh")
PRIVILEGE_FOLDER = Path("/run/sshd")
NO_SSHD = "needs sshd, ssh and ssh-keygen (apt-get install openssh-server)"
START_SECONDS = 10.0


def make_key(path: Path) -> None:
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


class SshServers:
    """Hosts by name, each a daemon that accepts the key of this user. `close` ends them with all their sessions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if SSHD is None or SSH is None:
            pytest.skip(NO_SSHD)
        if os.geteuid() == 0:
            PRIVILEGE_FOLDER.mkdir(exist_ok=True)
        self.folder = folder
        self.ports: dict[str, int] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        make_key(folder / "key")
        # The path of a socket has at most 108 bytes, unix(7).
        self.runtime = Path(tempfile.mkdtemp(prefix="ssh-"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(self.runtime))
        (folder / "bin").mkdir()
        program = folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/config "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def add(self, name: str) -> None:
        """Start a host whose key is known."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.ports[name] = server.getsockname()[1]
        make_key(self.folder / f"{name}-key")
        self.start(name)
        self.trust(name)
        entries = [
            f"Host {host}\n  HostName 127.0.0.1\n  Port {port}\n  User {user_name()}\n  HostKeyAlias {host}\n"
            for host, port in self.ports.items()
        ]
        common = f"IdentityFile {self.folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile {self.folder}/known\n"
        (self.folder / "config").write_text(common + "".join(entries))

    def trust(self, name: str) -> None:
        """Let this user know the key of a host, and of no other."""
        (self.folder / "known").touch()
        others = [line for line in self._known() if not line.startswith(f"{name} ")]
        key = (self.folder / f"{name}-key.pub").read_text()
        (self.folder / "known").write_text("".join(f"{line}\n" for line in others) + f"{name} {key}")

    def distrust(self, name: str) -> None:
        """Let this user not know the key of a host."""
        others = [line for line in self._known() if not line.startswith(f"{name} ")]
        (self.folder / "known").write_text("".join(f"{line}\n" for line in others))

    def _known(self) -> list[str]:
        return (self.folder / "known").read_text().splitlines()

    def start(self, name: str, *options: str) -> None:
        """Start the daemon of a host."""
        config = self.folder / f"{name}-sshd"
        # sshd takes the first value of an option.
        lines = [
            *options, f"Port {self.ports[name]}", "ListenAddress 127.0.0.1", f"HostKey {self.folder}/{name}-key",
            "UsePAM no",
            f"AuthorizedKeysFile {self.folder}/key.pub", "StrictModes no", "PermitRootLogin yes", "PidFile none",
            "PasswordAuthentication no", f"SetEnv PATH={os.environ['PATH']}",
        ]  # fmt: skip
        config.write_text("".join(f"{line}\n" for line in lines))
        assert SSHD is not None
        # A session, so that its end reaches the sessions of its users.
        self._daemons[name] = subprocess.Popen(
            [SSHD, "-D", "-E", str(self.log(name)), "-f", str(config)], start_new_session=True
        )
        assert wait_until(lambda: self._listens(name), START_SECONDS), self.log(name).read_text()

    def _listens(self, name: str) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[name])):
            return True
        return False

    def log(self, name: str) -> Path:
        """Return the log of a daemon."""
        return self.folder / f"{name}-log"

    def stop(self, name: str) -> None:
        """End a host with all connections to it, as a power cut does."""
        daemon = self._daemons.pop(name)
        children = subprocess.run(["pgrep", "-P", str(daemon.pid)], capture_output=True, text=True, check=False)
        for pid in map(int, children.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def close(self) -> None:
        for name in list(self._daemons):
            self.stop(name)
        shutil.rmtree(self.runtime)

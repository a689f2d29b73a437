"""Ranks on two hosts: network namespaces that a pair of virtual interfaces connects, each with its own host name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gputrain_command import GPUTRAIN, Gputrain, read_events

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "unshare", "mount")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or bool(missing), reason=f"needs root and {', '.join(TOOLS)}"),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def interface_name(host: int) -> str:
    return f"gpt{os.getpid()}-{host}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Two hosts whose own names resolve to 127.0.1.1, as in Debian; yield the start of a command on each."""
    names = [f"gputrain-{os.getpid()}-{number}" for number in range(2)]
    interfaces = [interface_name(number) for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ["peer", "name", interfaces[1], "netns", names[1]]
        ip("link", "add", interfaces[0], "netns", names[0], "type", "veth", *peer)
        commands = []
        for name, interface, address in zip(names, interfaces, ADDRESSES, strict=True):
            ip("-netns", name, "address", "add", f"{address}/24", "dev", interface)
            for up in ("lo", interface):
                ip("-netns", name, "link", "set", up, "up")
            known = zip(names, ADDRESSES, strict=True)
            table = tmp_path / f"hosts-{name}"
            lines = [f"{'127.0.1.1' if other == name else place} {other}" for other, place in known]
            table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            script = f'hostname {name} && mount --bind {table} /etc/hosts && exec "$@"'
            commands.append(
                [
                    str(shutil.which("ip")),
                    "netns",
                    "exec",
                    name,
                    "unshare",
                    "--uts",
                    "--mount",
                    "sh",
                    "-c",
                    script,
                    "sh",
                ]
            )
        yield commands
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_hosts_whose_names_resolve_to_loopback_connect_through_the_given_interface(
    gputrain: Gputrain, hosts: list[list[str]]
) -> None:
    arguments = ["run", "--headless", "digits", "--model", "linear", "--epochs", "1", "--name", "a", "--gpus", "cpu"]
    ranks = []
    for rank, command in enumerate(hosts):
        variables = [
            f"RANK={rank}",
            "WORLD_SIZE=2",
            "LOCAL_RANK=0",
            "LOCAL_WORLD_SIZE=1",
            f"MASTER_ADDR={ADDRESSES[0]}",
        ]
        variables += [f"GLOO_SOCKET_IFNAME={interface_name(rank)}"]
        launched = [*command, "env", *variables, "MASTER_PORT=29731", GPUTRAIN, *arguments, "device.timeout=30"]
        ranks.append(gputrain.start(*launched))
    for process in ranks:
        _, messages = process.communicate(timeout=150)
        assert process.returncode == 0, messages
    assert read_events(gputrain.runs / "a")[-1]["state"] == "finished"

"""Follow several hosts in the background: `HostWatch` keeps one connection per host and returns the last readings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.hosts.channel import parse_hosts
from engine.hosts.reading import HostReading

FIRST_WORD_SECONDS = 15.0


class HostWatch:
    """Follows hosts until it is closed. Its methods may be called from any thread, and do not wait for a host.

    `runs_dir` is the folder of the runs to follow, on hosts that have it; on others it is that of `gputrain runs` in
    the home. Raises UsageError for a name that no host has.
    """

    def __init__(self, names: Sequence[str], runs_dir: Path | None = None) -> None:
        self._readings = {name: HostReading(name) for name in parse_hosts(names)}

    def readings(self) -> tuple[HostReading, ...]:
        """Return what each host has said, in the order of the names."""
        return tuple(self._readings.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait until a reading changes, and return whether one did since the last call."""
        raise NotImplementedError

    def first_readings(self, timeout_s: float = FIRST_WORD_SECONDS) -> tuple[HostReading, ...]:
        """Return the readings as soon as each host has answered or failed, or the time is up."""
        raise NotImplementedError

    def retry(self, name: str) -> None:
        """Connect to a host that is down now, and not after the pause."""
        raise NotImplementedError

    def ask(self, name: str) -> int:
        """Connect to a host on this terminal, where ssh asks for passwords and new host keys. Return its exit code.

        The screen must be suspended. A connection that succeeds is used at once.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End all connections."""

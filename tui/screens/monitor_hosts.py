"""The other hosts of the monitor: which are folded, their runs, and what is done there.

`engine.jobs.hosts.watch` follows them in a thread, `tui.screens.tables.hosts` formats them. What changes a run of
another host is the command that a person would type for HOST:RUN. `MonitorScreen` imports this when there are other
hosts.
"""

from __future__ import annotations

import operator
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.base.errors import Problem
from engine.base.text import printable
from engine.gpus.snapshot import Gpu, Snapshot
from engine.jobs.hosts.channel import remote_command, ssh_argv
from engine.jobs.hosts.reading import HostReading, HostState, list_rows
from engine.runs.folder import RunState
from engine.runs.run_row import RunRow
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import LogDialog, confirm
from tui.screens.launcher import CALLED_HOST, call_gputrain, gputrain_command
from tui.screens.monitor_layout import FRAME_LINES, HEADER_LINES, Demand, MonitorLayout, arrange
from tui.screens.services import AppServices
from tui.screens.tables.hosts import HostGroup, hosts_summary
from tui.screens.tables.processes import gpu_matches, list_gpu_processes

LOG_LINES = 1000
# Hosts do not open and fold while they answer one after the other.
EXPECTED_GPUS = 8
MAX_ANSWER_LINES = 8
# What is done with a run of another host: the command, and what is asked before.
COMMANDS: Mapping[str, tuple[str, tuple[str, str, str] | None]] = {
    "stop": ("stop --no-wait", ("Stop {}?", "Keep it running", "Stop")),
    "delete": ("runs delete --yes", ("Move {} to the trash there?", "Keep", "Move to the trash")),
    "pause": ("runs pause", None),
    "continue": ("runs continue", None),
    "resume": ("resume --detach", None),
}


class MonitorHosts:
    """This host and the others, in groups, and the runs of all."""

    def __init__(self, app: AppServices, screen: GputrainScreen) -> None:
        self._app, self._screen = app, screen
        self.groups: Sequence[HostGroup] = ()
        self._problem: Problem | None = None
        self._local = _read_local(None, None)
        self.folds = False
        """Whether hosts are folded that nobody has opened."""
        self._opened: dict[str, bool] = {}
        """The hosts that the user has opened or folded."""
        self._sources: Sequence[Sequence[RunRow]] = ()
        """The lists that `_merged` was made of."""
        self._merged: Sequence[RunRow] = ()
        self._remote: dict[str, RunRow] = {}

    def update(self, snapshot: Snapshot | None, problem: Problem | None, readings: Sequence[HostReading]) -> None:
        """Take the latest readings. This host is first, with its GPUs or the problem that hides them; it may be among
        the others by another name."""
        if (self._local.snapshot, self._problem) != (snapshot, problem):
            self._local, self._problem = _read_local(snapshot, problem), problem
        local, host = self._local, snapshot and snapshot.host
        others = [
            reading
            for reading in readings
            if reading.name != local.name and (reading.snapshot is None or reading.snapshot.host != host)
        ]
        known = {group.name: group for group in self.groups}
        self.groups = [
            known[reading.name]
            if reading.name in known and known[reading.name].reading is reading
            else HostGroup(reading, is_here=reading is local)
            for reading in (local, *others)
        ]

    # Runs

    def merge(self, local: Sequence[RunRow]) -> Sequence[RunRow]:
        """Return the runs of this folder and those of other hosts, named HOST:RUN, the latest first. The same sequence
        tells that nothing has changed."""
        others = [group.reading for group in self.groups if not group.is_here]
        sources = [local, *(reading.rows for reading in others)]
        if len(sources) == len(self._sources) and all(map(operator.is_, sources, self._sources)):
            return self._merged
        here = {(row.folder, row.record.started_at) for row in local}
        # There is no folder of it here.
        remote = {
            row.name: row._replace(folder=row.name)
            for row in list_rows(others)
            if (row.folder, row.record.started_at) not in here
        }
        rows = sorted([*local, *remote.values()], key=lambda row: -(row.record.started_at or 0.0))
        self._sources, self._remote, self._merged = sources, remote, rows if remote else local
        return self._merged

    def is_remote(self, row: RunRow | None) -> bool:
        """Whether a row of `merge` is of another host."""
        return row is not None and row.folder in self._remote

    # GPUs

    @property
    def summary(self) -> str:
        """The sums of all hosts."""
        return hosts_summary(self.groups)

    def arrange(self, width: int, height: int) -> MonitorLayout:
        """Return the layout with a line for each host and each of its GPUs, or folded hosts if these do not fit."""
        processes = max((len(list_gpu_processes(group.gpus)) for group in self.groups), default=0)
        awaited = sum(EXPECTED_GPUS for group in self.groups if group.reading.state is HostState.CONNECTING)
        rows = awaited + sum(1 + len(group.gpus) for group in self.groups)
        layout = arrange(Demand(width, height, rows, processes, is_list=True))
        self.folds = rows > layout.gpus - FRAME_LINES - HEADER_LINES
        rows = sum(1 + len(gpus) for _, gpus in self.shown())
        return arrange(Demand(width, height, rows, processes, is_list=True))

    def is_elsewhere(self, key: str) -> bool:
        """Whether a line is that of a host, or of a GPU of another one."""
        group = self.find(key)
        return group is not None and (not group.is_here or key == group.key)

    def is_open(self, group: HostGroup) -> bool:
        return self._opened.get(group.name, not self.folds)

    def shown(self, query: str = "") -> list[tuple[HostGroup, Sequence[Gpu]]]:
        """Return the hosts with those of their GPUs that are shown. A filter looks into folded hosts, too."""
        if not query:
            return [(group, group.gpus if self.is_open(group) else ()) for group in self.groups]
        found = [(group, [gpu for gpu in group.gpus if gpu_matches(query, gpu)]) for group in self.groups]
        return [(group, gpus) for group, gpus in found if gpus or query in group.name.lower()]

    def find(self, key: str | None) -> HostGroup | None:
        """Return the host of a line, or of that of a GPU."""
        return next((group for group in self.groups if key in group.keys), None)

    def title_of(self, key: str) -> str:
        """Return what enter does on a line of a host or of a GPU."""
        group = self.find(key)
        if group is None or key != group.key:
            return "open GPU" if group is None or group.is_here else f"monitor of {group.name}"
        if group.reading.state is HostState.DOWN:
            return "log in" if group.reading.must_ask else "retry"
        return "fold" if self.is_open(group) else "unfold"

    def open(self, key: str) -> None:
        """Do that."""
        group = self.find(key)
        if group is None:
            return
        if key == group.key and group.reading.state is HostState.DOWN:
            self._connect(group)
        elif key == group.key:
            self._opened[group.name] = not self.is_open(group)
        elif group.reading.has_gputrain:
            command = remote_command(["env", f"{CALLED_HOST}={group.name}", "gputrain-tui"], marks=False)
            self._hand_over(ssh_argv(group.name, command, terminal=True, ask=True))
        else:
            reason = f"{group.name} has no gputrain that could show its GPUs"
            self._app.show_toast(Problem("", reason, code="not-installed"))

    def _connect(self, group: HostGroup) -> None:
        watch = self._app.host_watch
        if watch is not None and group.reading.must_ask:
            self._hand_over(lambda: watch.ask(group.name))
        elif watch is not None:
            watch.retry(group.name)
            self._app.show_toast(f"Connecting to {group.name}")

    # Runs of other hosts

    def attach(self, row: RunRow) -> None:
        """Show the screen of a run, which its host draws."""
        self._hand_over([*gputrain_command(), "attach", row.name])

    def can(self, action: str, row: RunRow) -> bool:
        """Whether one of the actions below has an effect in the state of a run."""
        if action == "pause":
            return row.live and not row.record.command
        return action == "log" or row.live == (action == "stop")

    def change(self, action: str, row: RunRow) -> None:
        """Send the command of an action, after a question if there is one, and show the answer."""
        if action == "log":
            self._show_log(row.name)
            return
        words, question = COMMANDS["continue" if action == "pause" and row.state == RunState.PAUSED else action]
        command = [*words.split(), row.name]

        def show(text: str) -> None:
            self._app.show_toast("\n".join(text.splitlines()[-MAX_ANSWER_LINES:]) or f"{action}: done")

        def send() -> None:
            self._app.show_toast(f"gputrain {' '.join(command)} …", timeout_s=2.0)
            self._call(command, show)

        if question:
            title, keep, do = question
            confirm(self._app, title.format(printable(row.name)), keep, do, send)
        else:
            send()

    def _show_log(self, name: str) -> None:
        """Show the end of the log as it is now."""
        lines = ["Loading …"]

        def show(text: str) -> None:
            lines[:] = text.splitlines()

        self._app.push_screen(LogDialog(name, lambda: lines))
        self._call(("logs", name, "-n", str(LOG_LINES)), show, lines.clear)

    def _call(
        self, words: Sequence[str], done: Callable[[str], None], failed: Callable[[], object] = lambda: None
    ) -> None:
        work = partial(call_gputrain, words, self._app.runs_dir)
        self._screen.act(work, done, failed, in_thread=True, is_awaited=False)

    def _hand_over(self, program: Sequence[str] | Callable[[], int]) -> None:
        """Give the terminal to a program until it ends. What it says when it fails stays until enter is pressed."""
        environment = os.environ | {"GPUTRAIN_RUNS": str(self._app.runs_dir)}
        with self._app.suspend():
            # No shell would continue the screen with the program.
            before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            code = program() if callable(program) else subprocess.call(program, env=environment)  # noqa: S603
            if code:
                input("\nPress enter to return to the monitor. ")
            signal.signal(signal.SIGTSTP, before)


def _read_local(snapshot: Snapshot | None, problem: Problem | None) -> HostReading:
    """Return the reading of this host."""
    name = socket.gethostname() if snapshot is None else snapshot.host
    if problem is not None:
        return HostReading(name, HostState.DOWN, str(problem))
    if snapshot is None:
        return HostReading(name)
    return HostReading(name, HostState.OK, snapshot.error or "", snapshot=snapshot)

"""What a user requests, and the checks that every run has, whatever it starts.

`tui.cli` makes requests; `launcher` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.command.spec import Program
from engine.config.code_trust import CodeTrust
from engine.config.limits import read_limits
from engine.config.schema import Config
from engine.queue.dependencies import DependencyError, Predecessor, check_cycles, find_dependencies
from engine.queue.state import Dependency
from engine.runs.claim import observe_claim, uncertain_claims, watch_claims
from engine.runs.events import WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.recorder import Listener
from engine.utils.errors import Problem, UsageError

if TYPE_CHECKING:
    from engine.optim.lr_range import LrRange


@dataclass(frozen=True)
class RunRequest:
    """A run that a user requested.

    `default_name` names it if `run.name` does not. `problems` are those of an invalid config, whose valid part is
    `config`: such a request is refused, together with what the preflight finds. `agents` are the torchrun agents that
    started the ranks, see `engine.launch.handshake.agent_id`. A dry run leaves no folder. `trust_owner` resumes a run
    that other users can change; `code_trust` says whose code the config may name. With `lr_range`, a learning rate
    range test replaces the training; such a request is a dry run. A `detached` run has no terminal: once its folder
    exists, it stays, also if the run is refused later. `typed` are the keys that the user typed, and `warnings` what
    the config alone gives reason to warn of. `input_source` says what of the model's input is that of its pretrained
    weights, see `engine.launch.input_keys`. A request with a `command` runs that instead of a training; of its config,
    the sections run, device, queue and notify have an effect. `tags` are put on the run once it has its folder.
    `program` is the `gputrain` command, with which a detached run may go on after it has slept in the queue."""

    config: Config
    runs_dir: Path
    default_name: str
    dry_run: bool = False
    agents: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    trust_owner: bool = False
    code_trust: CodeTrust = field(default_factory=CodeTrust)
    lr_range: LrRange | None = None
    detached: bool = False
    typed: frozenset[str] = frozenset()
    warnings: tuple[Problem, ...] = ()
    input_source: str = ""
    command: Program | None = None
    tags: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    @property
    def resumed_folder(self) -> RunFolder | None:
        """The folder of the run to resume, which may not exist (`run.requeue`); None for a new run."""
        run = self.config.run
        return RunFolder(self.runs_dir / run.name) if run.name is not None and (run.resume or run.requeue) else None


def limit_problems(request: RunRequest) -> list[Problem]:
    """Return why a run exceeds the limits of its user, whatever else runs."""
    try:
        return read_limits().problems(request.config, request.typed)
    except UsageError as error:
        return error.problems


def watch_other_claim(request: RunRequest, listener: Listener, check_stop: Callable[[], None] = lambda: None) -> None:
    """If the run to resume is claimed by another host, watch until it is known whether its process lives.

    Before the preflight, which would reserve GPUs for a run that cannot start. `check_stop` may raise."""
    folder = request.resumed_folder
    if folder is None or request.dry_run or request.problems:
        return
    owner = folder.owner
    observed, waits = observe_claim(owner), uncertain_claims([owner])
    if observed is None or not waits:
        return
    process, seconds = observed.claim.process, max(waits.values())
    message = f"{folder.name} is claimed by {process}; watching its heartbeat for up to {seconds:g} s"
    listener(WarningEvent(message=message, code="already-running"))
    watch_claims([owner], check_stop)


def check_dependencies(request: RunRequest) -> list[Dependency]:
    """Return the runs that a run waits for. Raises UsageError if one does not exist, or can no longer finish."""
    root, config = request.runs_dir, request.config
    dependencies = find_dependencies(root, config.queue.after, trust_owner=request.trust_owner)
    if config.run.name is not None:
        check_cycles(config.run.name, root, dependencies)
    for dependency in dependencies:
        followed = Predecessor(root, dependency)
        try:
            followed.waits_because()
        except DependencyError as error:
            raise UsageError.one("queue.after", str(error), code=error.code) from error
    return dependencies

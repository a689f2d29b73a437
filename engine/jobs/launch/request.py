"""What a user requests, the checks that every run has, and each change of its config on the way to its ranks.

`tui.cli` makes requests; `launcher` carries them out. The config changes in this order:

`settle_request`, before anything is reserved or claimed:

1. A run whose wait was interrupted waits again (`device.wait`), and the mode of its monitor is the stored one.
2. The input keys are those of the pretrained weights, or of the resumed run, whose precision stays too (`input_keys`).
3. User code is that in the copy of the resumed run (`run.snapshot`).

`settle_config`, with the devices and the folder of the run:

4. `data.batch_size` and `precision.amp` are what the preflight chose, on other hosts what rank 0 chose.
5. A batch size that the ranks found before stands in place of `auto`.
6. The run has its name, and is no request to resume any more.
7. User code is that in the copy that the run made; the stored config names the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.errors import Problem, UsageError
from engine.config.code_trust import CodeTrust
from engine.config.limits import over_limit_problems, read_limits
from engine.config.loader import resolve_config
from engine.config.monitor import monitor_mode, monitored_name
from engine.config.schema import Config
from engine.jobs.command.spec import Program
from engine.jobs.launch.run_code import copied_folder, stored_code
from engine.jobs.queue.dependencies import DependencyError, Predecessor, check_cycles, find_dependencies
from engine.jobs.queue.state import Dependency, is_interrupted
from engine.runs.claim import observe_claim, uncertain_claims, watch_claims
from engine.runs.events import WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import Better
from engine.runs.recorder import Listener

if TYPE_CHECKING:
    from engine.jobs.code.record import CodeRecord
    from engine.train.optim.lr_range import LrRange


@dataclass(frozen=True)
class RunRequest:
    """A run that a user requested.

    `default_name` names it if `run.name` does not. `problems` are those of an invalid config, whose valid part is
    `config`: such a request is refused, together with what the preflight finds. `agents` are the torchrun agents that
    started the ranks, see `engine.jobs.launch.handshake.agent_id`. A dry run leaves no folder. `trust_owner` resumes a
    run that other users can change; `code_trust` says whose code the config may name. With `lr_range`, a learning rate
    range test replaces the training; such a request is a dry run. A `detached` run has no terminal: once its folder
    exists, it stays, also if the run is refused later. `typed` are the keys that the user typed, and `warnings` what
    the config alone gives reason to warn of. `input_source` says what of the model's input is that of its pretrained
    weights, see `engine.jobs.launch.preflight`. A request with a `command` runs that instead of a training; of its
    config, the sections run, device, queue and notify have an effect. `tags` are put on the run once it has its
    folder."""

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

    @property
    def resumed_folder(self) -> RunFolder | None:
        """The folder of the run to resume, which may not exist (`run.requeue`); None for a new run."""
        run = self.config.run
        return RunFolder(self.runs_dir / run.name) if run.name is not None and (run.resume or run.requeue) else None


def limit_problems(request: RunRequest) -> list[Problem]:
    """Return why a run exceeds the limits of its user, whatever else runs."""
    try:
        return over_limit_problems(read_limits(), request.config, request.typed)
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


@dataclass(frozen=True)
class SettledConfig:
    """The config of a run: as its ranks use it, and as its folder stores it for a run that repeats it."""

    used: Config
    stored: Config


def settle_request(request: RunRequest) -> RunRequest:
    """Return a request with what only the files of its run change in its config. The command of another program gets
    its copy of the code when it starts."""
    folder = request.resumed_folder
    if folder is not None and is_interrupted(folder):
        request = replace(request, config=request.config.with_values(device={"wait": True}))
    if request.command is not None:
        return request
    request = replace(request, config=_with_monitor_mode(request.config, request.runs_dir))
    # A command waits in memory for days, and has no input.
    from engine.jobs.launch.preflight import with_input_keys

    request = with_input_keys(request)
    place = copied_folder(stored_code(folder), folder) if folder is not None and request.config.run.snapshot else None
    if place is not None:
        request = replace(request, config=request.config.with_values(run={"code": str(place)}))
    return request


def _with_monitor_mode(config: Config, runs_dir: Path) -> Config:
    """Return a config with the mode that the user has stored for the monitored metric, if it leaves it open."""
    stored = read_directions(runs_dir).get(monitored_name(config))
    if stored is None or monitor_mode(config) is not None:
        return config
    return config.with_values(run={"monitor_mode": "min" if stored is Better.LOW else "max"})


def settle_config(
    config: Config, folder: RunFolder, code: CodeRecord | None, *, is_resumed: bool, is_training: bool = True
) -> SettledConfig:
    """Return the config of a run in a folder. `is_resumed` says whether it has trained there before."""
    if config.data.batch_size == "auto" and is_resumed and folder.config.exists():
        # Only read: no code that it names runs.
        size = resolve_config(str(folder.config), trust_code=True).config.data.batch_size
        config = config.with_values(data={"batch_size": size})
    config = config.with_values(run={"name": folder.name, "resume": False})
    place = copied_folder(code, folder)
    if code is None or place is None or not is_training:
        return SettledConfig(config, config)
    original = Path(code.root, code.folder)
    return SettledConfig(*(config.with_values(run={"code": str(path)}) for path in (place, original)))

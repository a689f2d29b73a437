"""Options that belong together: those of a command on runs, and those of one that uses a trained model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from engine.base.errors import Problem, UsageError, collect_problems
from engine.base.text import pluralize, printable
from engine.runs.claim import uncertain_claims, watch_claims
from engine.runs.find import OpenedRun, find_run, is_prefix_of, run_place
from engine.runs.folder import RunFolder
from engine.runs.manage import find_own_run
from engine.runs.root import runs_root
from tui.cli.command import Callback, expand_parameter
from tui.cli.config_arguments import trust_option
from tui.cli.options import RunsDirOption, TrustCodeOption, TrustOwnerOption, run_argument

if TYPE_CHECKING:
    from engine.config.code_trust import CodeTrust

REQUIRED = inspect.Parameter.empty
T = TypeVar("T")
R = TypeVar("R")


def takes_run(function: Callback, *, reads: bool = False) -> Callback:
    """Replace the parameter `folder: RunFolder` by RUN, --runs-dir and --trust-owner."""
    parameters = {
        "run": (Annotated[str, run_argument(reads=reads)], REQUIRED),
        "runs_dir": (RunsDirOption, None),
        "trust_owner": (TrustOwnerOption, False),
    }

    def find(values: dict[str, Any]) -> RunFolder:
        return find_runs([values["run"]], values["runs_dir"], trust_owner=values["trust_owner"], reads=reads)[0]

    return expand_parameter(function, "folder", parameters, find)


def takes_runs(function: Callback, *, reads: bool = False) -> Callback:
    """Replace the parameter `folders: list[RunFolder]` by RUN..., --runs-dir and --trust-owner; each run once."""
    parameters = {
        "runs": (Annotated[list[str], run_argument("RUN...", reads=reads)], REQUIRED),
        "runs_dir": (RunsDirOption, None),
        "trust_owner": (TrustOwnerOption, False),
    }

    def find(values: dict[str, Any]) -> list[RunFolder]:
        return find_runs(values["runs"], values["runs_dir"], trust_owner=values["trust_owner"], reads=reads)

    return expand_parameter(function, "folders", parameters, find)


# For commands that change nothing in the run, so that RUN may be the beginning of a name.
reads_run = partial(takes_run, reads=True)
reads_runs = partial(takes_runs, reads=True)


def takes_own_runs(function: Callback) -> Callback:
    """Replace the parameter `folders: list[RunFolder]` by RUN... and --runs-dir, of runs that the user may change."""
    parameters = {"runs": (Annotated[list[str], run_argument("RUN...")], REQUIRED), "runs_dir": (RunsDirOption, None)}
    return expand_parameter(
        function, "folders", parameters, lambda values: find_own_runs(values["runs"], values["runs_dir"])
    )


@dataclass(frozen=True)
class ModelOptions:
    """Which weights of a run are used, on which device, and whose code may run."""

    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="CHECKPOINT", help="Checkpoint to load: best, last, or a file.")
    ] = "best"
    ema: Annotated[bool, typer.Option("--ema/--no-ema", help="Use the EMA weights, if the checkpoint has them.")] = True
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="GPUS", help="GPU to use: auto (a free one, else the CPU), cpu, an index or a UUID."
        ),
    ] = "auto"
    trust_code: TrustCodeOption = False

    @property
    def trust(self) -> CodeTrust:
        return trust_option(granted=self.trust_code)


def find_runs(names: Sequence[str], runs_dir: str | None, *, trust_owner: bool, reads: bool = False) -> list[RunFolder]:
    """Return runs by name, each once. Raises UsageError with a problem for each that cannot be used."""
    root = runs_root(runs_dir)
    found = for_each(names, lambda name: find_run(root, name, trust_owner=trust_owner, reads=reads))
    for name, folder in zip(names, found, strict=True):
        _name_completed(name, folder)
    return list({folder.path: folder for folder in found}.values())


def find_any_runs(names: Sequence[str], runs_dir: str | None, *, trust_owner: bool) -> list[OpenedRun]:
    """Return runs by name and foreign runs by path, each once and with a name of its own.

    Raises UsageError with a problem for each that cannot be used."""
    from engine.runs.find import distinct_runs, find_any_runs

    root = runs_root(runs_dir)
    found = for_each(names, lambda name: find_any_runs(root, name, trust_owner=trust_owner))
    for name, runs in zip(names, found, strict=True):
        _name_completed(name, runs[0])
    return distinct_runs(run for runs in found for run in runs)


def _name_completed(typed: str, run: OpenedRun) -> None:
    """Say on stderr which run the beginning of a name means."""
    if isinstance(run, RunFolder) and is_prefix_of(run, typed):
        typer.echo(f"{printable(typed)} is the beginning of {printable(run.name)}.", err=True)


def find_baseline(
    name: str | None, runs: Sequence[OpenedRun], runs_dir: str | None, *, trust_owner: bool
) -> int | None:
    """Return the place among compared runs of the one that --baseline names. Raises UsageError."""
    if name is None:
        return None
    places = [run_place(run) for run in runs]
    found = [run_place(run) for run in find_any_runs([name], runs_dir, trust_owner=trust_owner)]
    if len(found) != 1:
        raise UsageError.one("--baseline", f"{name} has {len(found)} runs; name one of them", code="ambiguous-name")
    if found[0] not in places:
        reason = f"{name} is not among the compared runs; name it as a RUN, too"
        raise UsageError.one("--baseline", reason, code="unknown-value")
    return places.index(found[0])


def find_own_runs(names: Sequence[str], runs_dir: str | None) -> list[RunFolder]:
    """Return runs of the user by name, each once. Raises UsageError with a problem for each that cannot be changed."""
    root = runs_root(runs_dir)
    found = for_each(names, lambda name: find_own_run(root, name))
    return list({folder.path: folder for folder in found}.values())


def for_each(items: Sequence[T], act: Callable[[T], R]) -> list[R]:
    """Do something with each item, and return the results. Raises UsageError with all problems at the end."""
    problems, results = list[Problem](), list[R]()
    for item in items:
        with collect_problems(problems):
            results.append(act(item))
    if problems:
        raise UsageError(problems)
    return results


def watch_other_hosts(folders: Sequence[RunFolder]) -> None:
    """Watch the heartbeats of runs that other hosts claim, until it is known whether those live. Says so on stderr."""
    if announce_watch(folders):
        watch_claims([folder.owner for folder in folders])


def announce_watch(folders: Sequence[RunFolder]) -> bool:
    """Say on stderr that heartbeats of other hosts are to be watched. Return whether there are any."""
    owners = {folder.owner: folder for folder in folders}
    waits = uncertain_claims([*owners])
    if not waits:
        return False
    of_runs = printable(owners[next(iter(waits))].name) if len(waits) == 1 else pluralize(len(waits), "run")
    typer.echo(f"Watching the heartbeat of {of_runs} for up to {max(waits.values()):g} s.", err=True)
    return True
